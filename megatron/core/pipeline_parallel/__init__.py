"""Pipeline parallelism: layers dealt over stages, schedules as data, one engine that runs any of them.

Import the modules one by one: ``partition``, ``schedules`` and ``simulation`` are pure Python, so that a
planner uses them without loading torch.
"""
