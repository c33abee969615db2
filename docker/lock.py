"""Write `docker/locked/`: every package that images and developers install, with its version and
its files' SHA-256.

Run by `make constraints`. Versions are those of constraints.txt; hashes are those that PyPI gives
for all files of a version. Of torch there are two builds, in files of their own: that on PyPI,
which brings the CUDA libraries of a further file, and PyTorch's own for CPUs.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

LOCKED = Path("docker/locked")
EXTRAS = {
    "cluster": ["otel", "sign", "scale"],  # the service with Ray
    "service": ["otel", "sign", "pools", "bucket"],
    "training": ["training", "sign", "bucket"],
    "dev": ["otel", "sign", "pools", "bucket", "training", "dev", "bench"],
}
LEFT_OUT = (
    "huggingface-hub",
)  # tokenizers names it, but imports it for downloads alone, which nothing here makes
CUDA = re.compile(r"(triton|(nvidia|cuda)-[\w-]+)==")
# PyTorch's CPU builds for Python 3.11, which are not on PyPI: by version, for x86_64 and aarch64.
# They are those of
# https://download.pytorch.org/whl/cpu/torch/
CPU_BUILDS_OF_TORCH = {
    "2.13.0": [
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
    ]
}
WINDOWS = " ; sys_platform == 'win32'"
NOTE = "# Written by `make constraints`.\n"


def main() -> None:
    """Write all files."""
    pins = Path("constraints.txt").read_text(encoding="utf-8")
    version = re.search(r"^onnxruntime==(\S+)$", pins, re.MULTILINE)
    assert version is not None
    # Where there is no CUDA, onnxruntime-gpu brings its own.
    gpu = f"onnxruntime-gpu[cuda,cudnn]=={version[1]}\n"
    LOCKED.mkdir(exist_ok=True)
    for name, extras in EXTRAS.items():
        for runtime in ("cpu", "gpu"):
            packages = locked([runtime, *extras], gpu if runtime == "gpu" else "")
            if name != "dev":  # images are of Linux
                packages = [package for package in packages if WINDOWS not in package]
            torch = [package for package in packages if package.startswith("torch==")]
            cuda = [package for package in packages if CUDA.match(package) and runtime == "cpu"]
            write(
                f"{name}-{runtime}",
                [package for package in packages if package not in [*torch, *cuda]],
            )
            if (name, runtime) == ("training", "cpu"):
                write("torch", torch)
                write("torch-cpu", [cpu_build(package) for package in torch])
                write("cuda", cuda)


def locked(extras: list[str], further: str) -> list[str]:
    """Return what some extras of the project install, each package with its hashes, on several
    lines."""
    command = [
        str(Path(sys.executable).with_name("uv")),
        "pip",
        "compile",
        "--quiet",
        "pyproject.toml",
        "-",
    ]
    command += [option for extra in extras for option in ("--extra", extra)]
    command += [
        "--constraint",
        "constraints.txt",
        "--constraint",
        "docker/ray.txt",
        "--generate-hashes",
        "--only-binary",
        ":all:",
        "--universal",
    ]
    command += ["--python-version", "3.11", "--no-header", "--no-annotate"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.writelines(f"{name} ; python_version < '3'\n" for name in LEFT_OUT)
        overrides.flush()
        command += ["--override", overrides.name]
        text = subprocess.run(
            command, input=further, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    return re.findall(r"^\S.*\n(?: .*\n)*", text, re.MULTILINE)


def cpu_build(torch: str) -> str:
    """Return torch's CPU build in place of the build on PyPI."""
    version = torch.partition("==")[2].split()[0]
    if version not in CPU_BUILDS_OF_TORCH:
        sys.exit(f"docker/lock.py: CPU_BUILDS_OF_TORCH: expected the hashes of {version}, got none")
    hashes = [f"    --hash=sha256:{digest}" for digest in CPU_BUILDS_OF_TORCH[version]]
    return " \\\n".join([f"torch=={version}+cpu", *hashes]) + "\n"


def write(name: str, packages: list[str]) -> None:
    """Write a file of packages."""
    (LOCKED / f"{name}.txt").write_text(NOTE + "".join(packages), encoding="utf-8")


if __name__ == "__main__":
    main()
