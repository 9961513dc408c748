"""Plan before a job: bytes and transfers of every choice, from shapes alone."""
