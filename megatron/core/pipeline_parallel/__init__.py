"""Pipeline parallelism: layers dealt over stages, schedules as data, one engine that runs any of them.

Import the modules one by one: all but ``engine`` and ``p2p`` are pure Python, so that a planner uses them
without loading torch.
"""
