"""What `compare_goodput.py` is made of: the systems that are compared, the order of runs, timelines, plots."""
