import errno
import os
import subprocess
import sys

import pytest

from model_store.errors import StoreError
from model_store.processes import inherited_environment, is_out_of_memory, processors


def test_cpu_count_is_used_without_sched_getaffinity(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert processors(tmp_path / "none", tmp_path / "none") == 6


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9000000 100000", 8),
        ("", 8),
        ("many 100000", 8),
        ("1 0", 8),
        (None, 8),
    ],
)
def test_processors_do_not_exceed_container_limit(monkeypatch, tmp_path, content, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert processors(tmp_path, tmp_path / "none") == expected


@pytest.mark.parametrize(
    ("files", "process_cgroup", "expected"),
    [
        ({"a/b/cpu.max": "300000 100000", "a/cpu.max": "max 100000"}, "0::/a/b", 3),
        ({"a/b/cpu.max": "300000 100000", "a/cpu.max": "200000 100000"}, "0::/a/b", 2),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/x/y", 4),
        ({"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, "3:cpu:/x", 1),
        (
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "250000",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            "4:cpu,cpuacct:/x\n3:memory:/y",
            2,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/", 8),
        ({"unified/x/cpu.max": "200000 100000"}, "3:cpuset:/\n0::/x", 2),
    ],
)
def test_limits_of_nested_and_version_1_cgroups_apply(
    monkeypatch, tmp_path, files, process_cgroup, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "own").write_text(process_cgroup)
    assert processors(tmp_path, tmp_path / "own") == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"), True),
        (RuntimeError("Failed to allocate memory for requested buffer of size 4096"), True),
        (RuntimeError("Available memory of 1 is smaller than requested bytes of 64"), True),
        (RuntimeError("CUDA failure 2: out of memory ; GPU=0"), True),
        (RuntimeError("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (StoreError("network.onnx: Cannot allocate memory"), True),
        (ValueError("unknown column asset_allocation"), False),
        (RuntimeError("Input 'alloc' is missing"), False),
    ],
    ids=str,
)
def test_memory_errors_are_recognised_by_type_or_exact_text(error, expected):
    assert is_out_of_memory(error) == expected
    outer = RuntimeError("outer")
    outer.__cause__ = error
    assert is_out_of_memory(outer) == expected


def test_children_inherit_only_variables_without_secrets(monkeypatch):
    public = {"PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/x"}
    storage = {"AWS_ACCESS_KEY_ID": "k", "https_proxy": "http://p", "DUBITO_STORE": "s3://b"}
    secrets = ["DUBITO_CLIENT_KEY", "DUBITO_API_KEYS", "DUBITO_LABEL_STUDIO_TOKEN", "MY_PASSWORD"]
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in {
        **public,
        **storage,
        **dict.fromkeys(secrets, "x"),
        "PATH_KEY": "x",
    }.items():
        monkeypatch.setenv(name, value)
    assert inherited_environment() == public
    assert inherited_environment(is_trusted=True) == public | storage


@pytest.mark.parametrize("overrides", [{}, {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "3"}])
def test_training_threads_spin_briefly_unless_environment_overrides(overrides):
    defaults = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(processors()),
        "GOMP_SPINCOUNT": "4000",
    }
    script = f"import os; from training.commands import configure_process; configure_process(); print(*map(os.environ.get, {[*defaults]}))"
    environment = {name: value for name, value in os.environ.items() if name not in defaults}
    completed = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | overrides,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {**overrides, "GOMP_SPINCOUNT": "None"} if overrides else defaults
    assert completed.stdout.split() == [*expected.values()]
