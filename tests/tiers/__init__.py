"""The NVMe tier, on the disk that the tests run on."""
