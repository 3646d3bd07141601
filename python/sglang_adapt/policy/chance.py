"""What chance costs where requests come at random times and with random lengths: closed formulas.

The estimates of `policy.efficiency` are balances of means, which is enough to tell TP sizes apart. Engines in roles
differ from mixed ones in what chance does, so both are compared with it (`policy.division`).
"""

from __future__ import annotations

import math


def admitted_rps(offered_rps: float, capacity_rps: float, room: float, spread: float) -> float:
    """The rate of requests that find their wait within the target, of those that come at random times.

    A queue that takes nobody in who would wait longer than is allowed. In heavy traffic its work is a Brownian motion
    between two walls (Harrison, Brownian Motion and Stochastic Flow Systems, 1985), and what it does not carry is the
    time in which it stands at the lower one.

    Args:
        offered_rps: requests that come.
        capacity_rps: requests that are served while there are any.
        room: so many requests, in the mean, may be before one that is still in time; infinite without a target.
        spread: of the work of a request, variance by the square of the mean.
    """
    if capacity_rps <= 0 or offered_rps <= 0:
        return 0.0
    over = offered_rps / capacity_rps - 1
    slope = 2 * max(room, 0.5) / (1 + spread)
    power = over * slope
    if abs(power) < 1e-6:
        idle = 1 / slope if math.isfinite(slope) else 0.0
    elif power > 50:
        idle = 0.0
    elif power < -50:
        idle = -over
    else:
        idle = over / math.expm1(power)
    return min(offered_rps, capacity_rps * max(0.0, 1 - idle))


def kept_share(target_ms: float, tpot_ms: float, prompts_ms2: float, output: float) -> float:
    """The part of requests whose TPOT is within a target although prompts of random lengths come between their tokens.

    TPOT of a request with `n` tokens is normally distributed about the mean, with a variance of `prompts_ms2 x tpot /
    n`: prompts come as a Poisson process. Lengths of outputs are taken as exponential, as most traces have them about
    so; then the mean over them is that of the error rate of a fading channel (Proakis, Digital Communications, 14.3).

    Args:
        target_ms: of TPOT; infinite without one.
        tpot_ms: the mean.
        prompts_ms2: squares of the times of the prompts that an engine reads, in ms^2, for each ms.
        output: tokens of a request, in the mean.
    """
    if math.isinf(target_ms) or prompts_ms2 <= 0:
        return 1.0
    if tpot_ms >= target_ms:
        return 0.5
    ratio = (target_ms - tpot_ms) ** 2 * output / (prompts_ms2 * tpot_ms)
    return 0.5 * (1 + math.sqrt(ratio / (ratio + 2)))


def steady_batch(most: float, engines: float) -> float:
    """The mean of requests that decode on each of some engines if hardly ever more than `most` do, three standard
    deviations away: their number is about Poisson, over all engines together. What is too many stays so for as long as
    an answer takes, and all miss their targets meanwhile."""
    return max(0.5 * most, most - 3 * math.sqrt(most / max(1.0, engines)))
