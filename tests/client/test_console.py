import argparse
import subprocess
import sys
from importlib.metadata import EntryPoints

import pytest

import model_store.__main__
import service.__main__
import training.__main__
from dubito import command
from dubito.command import build_parser, main
from tests.support.environment import ROOT, environment_with


def subcommands(parser):
    """Yield names and parsers of all subcommands, including nested subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield name, child
                yield from ((f"{name} {inner}", leaf) for inner, leaf in subcommands(child))


def test_every_command_has_function_and_help(capsys):
    commands = dict(subcommands(build_parser()))
    assert {"predict", "fit", "serve", "store keep", "label-studio push", "reproduce"} <= {
        *commands
    }
    for name, parser in commands.items():
        assert parser.get_default("run") or [*subcommands(parser)], name
        assert parser.description, name
        assert parser.format_help().startswith(f"usage: dubito {name} ")


@pytest.mark.parametrize(
    ("module", "prefix"), [(training, ""), (service, ""), (model_store, "store ")]
)
def test_module_commands_are_available_in_dubito(module, prefix, monkeypatch):
    parsers = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda self, _: parsers.append(self) or exit(0)
    )
    with pytest.raises(SystemExit):
        module.__main__.main(["--help"])
    reference = {name for name, _ in subcommands(build_parser())}
    assert {f"{prefix}{name}" for name, _ in subcommands(parsers[0])} <= reference


def test_bash_completes_commands_and_options(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def complete(*words):
        line = " ".join(f"'{word}'" for word in ("dubito", *words))
        call = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_dubito dubito '{words[-1]}'"
        completed = subprocess.run(
            ["bash", "-c", f"{script}\n{call}; echo ${{COMPREPLY[@]}}"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        return completed.stdout.split()

    assert complete("ev") == ["evaluate"]
    assert complete("store", "ke") == ["keep", "keygen"]
    assert complete("labels", "push", "--rep") == ["--replace"]


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["fitt"])
    assert raised.value.code == 2
    assert "invalid choice: 'fitt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("sklearn", "this command needs the extra `training`: pip install 'dubito[training]'"),
        ("onnxruntime", "this command needs the extra `cpu`: pip install 'dubito[cpu]'"),
        ("mine", "No module named 'mine'"),
    ],
)
def test_error_names_the_missing_extra(module, message, monkeypatch, capsys):
    def fail(options):
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr("dubito.command._print_completion", fail)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == f"dubito: {message}\n"


def test_client_without_extras_has_only_client_commands(monkeypatch, capsys):
    monkeypatch.setattr(command, "entry_points", lambda group: EntryPoints())
    commands = {name for name, _ in subcommands(build_parser())}
    assert {"predict", "acquire", "models", "labels push", "jobs list", "completion"} <= commands
    assert not commands & {"fit", "serve", "store", "label-studio"}


def test_missing_module_is_reported_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "training.commands.actions", None)
    assert main(["fit"]) == 1
    assert capsys.readouterr().err.startswith("dubito: ")
    assert sys.path[0] == str(tmp_path)


def test_help_imports_no_heavy_packages():
    code = """
import sys
from dubito.command import main
try:
    main(["--help"])
finally:
    print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv)))
"""
    heavy = ["numpy", "httpx", "torch", "pydantic", "onnx", "onnxruntime", "fastapi", "pyarrow"]
    completed = subprocess.run(
        [sys.executable, "-c", code, *heavy],
        env=environment_with(PYTHONPATH=str(ROOT / "client")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (completed.stdout.splitlines()[-1], completed.returncode) == ("[]", 0), completed.stderr


def test_package_exports_only_public_names():
    import dubito

    assert all(getattr(dubito, name) for name in dubito.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        dubito.nothing  # noqa: B018
