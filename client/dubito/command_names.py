"""The commands of `dubito` that ask a service, and the variables that they read."""

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
