"""`lightning-zero check`: whether this machine trains as it should, and how fast.

    checks   the checks, each a function that all ranks of a new group call
    systems  what the checks train, and how: by DDP, by FSDP2 and by the engine
    ranks    processes for each check, which may hang or die without harm to the others

Begin with the table `CHECKS` in `checks`.
"""
