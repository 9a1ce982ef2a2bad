"""The commands of `posttrain`:

app.py        the program, the options that commands share, and how a command ends
pipelines.py  run, sweep, rerun, answer
stage.py      stage
describe.py   what a stage or a recipe is, printed
servers.py    up, down, status, deploy, doctor
results.py    ls, show, rm, cost, lineage, compare, promote, alias, select, export, chat

`flows/cli.py` makes them a program and turns errors into messages and exit codes.
"""
