"""Every touch on stock sglang lives in this room: version gate, patches, CPU platform, wire format, ranks.

Out of scope: decisions of any kind. This room only makes stock sglang do what the rooms above ask for.
"""
