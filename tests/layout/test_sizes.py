"""Numbers with units: the same in settings, on the command line and in a Hydra configuration."""

import pytest

from lightning_zero import OffloadConfig, ZeroConfig
from lightning_zero.layout.sizes import format_bytes, parse_bytes, parse_count
from tests.support.composed import composed


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("24G", 24 * 10**9),
        ("1M", 10**6),
        ("256K", 256_000),
        ("64Mi", 2**26),
        ("1.5ki", 1536),
        ("2.3T", 23 * 10**11),
        (" 7 g ", 7 * 10**9),
    ],
)
def test_a_prefix_means_the_same_of_elements_and_of_bytes(text, number):
    assert parse_count(text) == parse_bytes(text) == parse_bytes(text.strip() + "B") == number


def test_counts_take_no_bytes_and_bytes_need_a_unit():
    assert parse_count("1000") == parse_bytes("1000B") == parse_bytes("1kB") == 1000
    for text in ("64MB", "1B", "0.5", "0.0001K", "-1", "1e8", "many", "", "M", "1 000", "iB"):
        with pytest.raises(ValueError, match=f"integer such as 1000, 64M or 256Ki, got {text!r}"):
            parse_count(text)
    for text in ("-1GiB", "24GX", "24i", "24iB", "", "GiB", "1e9B"):
        with pytest.raises(ValueError, match=f"such as 24GiB, 500MB or 1000B, got {text!r}"):
            parse_bytes(text)
    with pytest.raises(ValueError, match="24 has no unit; write 24GiB or 24GB"):
        parse_bytes("24")
    with pytest.raises(ValueError, match=r"expected at least one byte, got '0\.1B'"):
        parse_bytes("0.1B")


def test_settings_accept_units():
    config = OffloadConfig("auto", max_in_cpu_bytes="24GiB", max_in_device_bytes="1.5GB")
    assert (config.max_in_cpu_bytes, config.max_in_device_bytes) == (24 * 2**30, 1_500_000_000)
    assert OffloadConfig("nvme", buffer_size="16Mi").buffer_size == 2**24
    with pytest.raises(TypeError, match=r"max_in_cpu_bytes .*, got '24'; write .* \"8GiB\""):
        OffloadConfig("nvme", max_in_cpu_bytes="24")
    with pytest.raises(TypeError, match=r"buffer_size .*, got '64MB'; write .* \"64M\""):
        OffloadConfig("nvme", buffer_size="64MB")


def test_a_hydra_override_accepts_units():
    strategy = composed("trainer.strategy.reduce_bucket_size=64Mi").trainer.strategy
    assert ZeroConfig(reduce_bucket_size=strategy.reduce_bucket_size).reduce_bucket_size == 2**26


def test_bytes_are_formatted_in_the_largest_binary_unit_that_fits():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**40)] == [
        "0 bytes",
        "1023 bytes",
        "1.50 KiB",
        "1024.00 GiB",
    ]
