"""The client's commands, for the page of help; `dubito.asking` does them."""

import argparse

URL_VARIABLE = "DUBITO_CLIENT_URL"
KEY_VARIABLE = "DUBITO_CLIENT_KEY"
ENVIRONMENT = (
    f"{URL_VARIABLE} names the service that is asked, where --url does not; {KEY_VARIABLE} holds "
    "an API key."
)
COMPLETION = "print a script that has bash, zsh or fish complete commands and options"
COMMANDS = {
    "predict": "predict the rows of a file",
    "acquire": "choose the rows to label next",
    "models": "list the models",
    "labels": "push | list | export | delete: labels of acquired rows",
    "jobs": "list | status | result | cancel | delete: what the service works on",
    "studio": "push: the rows to label next become tasks of Label Studio",
    "completion": COMPLETION,
}
SECTIONS = {"Ask a service": COMMANDS}


def parser(_: str) -> argparse.ArgumentParser:
    from dubito.asking import parser

    return parser()


def run(command: str, arguments: list[str]) -> int:
    from dubito.asking import run

    return run([command, *arguments])
