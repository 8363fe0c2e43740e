"""The CPU levels a machine is offered, from texts of /proc/cpuinfo."""

import os

import pytest

from autotune import target

V2 = "fpu lm cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def cpuinfo(*flags: str, name: str = "AMD EPYC 9654 96-Core Processor") -> str:
    """As Linux writes it, a block a logical CPU."""
    head = f"vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {name}\nstepping\t: 1"
    return "".join(f"processor\t: {i}\n{head}\nflags\t\t: {f}\nbugs\t\t:\n\n" for i, f in enumerate(flags))


def archs(*flags: str) -> list[str]:
    return [t.arch for t in target.offered(cpuinfo(*flags))]


def test_the_best_level_comes_first():
    assert archs(V4) == ["cpu-v4", "cpu-v3"]
    assert archs(V3) == ["cpu-v3"]
    assert archs(V2) == []


@pytest.mark.parametrize("flag", [f for f in V3.split() if f not in ("fpu", "lm")])
def test_every_v3_flag_is_needed(flag: str):
    rest = [f for f in V4.split() if f != flag]
    assert archs(" ".join(rest)) == []


@pytest.mark.parametrize("flag", ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
def test_without_a_v4_flag_v3_remains(flag: str):
    rest = [f for f in V4.split() if f != flag]
    assert archs(" ".join(rest)) == ["cpu-v3"]


def test_lzcnt_is_another_name_of_abm():
    assert archs(V3.replace("abm", "lzcnt")) == ["cpu-v3"]


def test_a_level_that_some_cores_lack_is_not_offered():
    assert archs(V4, V3) == ["cpu-v3"]


@pytest.mark.parametrize("text", ["", "processor\t: 0\nFeatures\t: fp asimd\n", "flags\t:\n"])
def test_other_machines_are_offered_nothing(text: str):
    assert target.offered(text) == ()


def test_a_machine_without_cpuinfo_is_offered_nothing(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(target.Path, "read_text", refuse)
    assert target.offered() == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654 96-Core Processor"),
        ("AMD EPYC", "AMD EPYC 25/17/1"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel(R) Xeon(R) CPU @ 2.20GHz 25/17/1"),
        ("", "25/17/1"),
    ],
)
def test_a_generic_name_is_told_apart_by_its_numbers(name: str, expected: str):
    assert {t.name for t in target.offered(cpuinfo(V4, name=name))} == {expected}


def test_cores_are_those_this_process_may_use():
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert target.offered(cpuinfo(V4, V4, V4))[0].cores == 1
    finally:
        os.sched_setaffinity(0, usable)
    assert target.offered(cpuinfo(V4))[0].cores == len(usable)


def test_native_is_the_best_offered():
    assert target.native() == next(iter(target.offered()), None)


def test_a_named_target_has_no_device():
    assert {arch: target.named(arch).arch for arch in target.CPU_ARCHS} == {a: a for a in target.GCC_MARCH}
    assert (target.named("cpu-v4").name, target.named("cpu-v4").cores) == ("", 0)


def test_an_unknown_arch_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'cpu-v9'.*cpu-v4, cpu-v3"):
        target.named("cpu-v9")
