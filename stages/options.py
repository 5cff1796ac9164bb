"""The options that all stage commands share, declared once so that they read the same everywhere.

Nothing heavy is imported here or at the top of any command module: `wcpipe --help` must answer at once.
"""

from pathlib import Path
from typing import Annotated

import typer

Epoch = Annotated[
    str, typer.Option("--epoch", "-e", help="Epoch of params.yaml, such as e001.", show_default=False)
]
Root = Annotated[
    Path, typer.Option("--root", help="Folder of the artifacts; each epoch has its own folder in it.")
]
ParamsFile = Annotated[Path, typer.Option("--params", help="The parameters file.")]
ShardText = Annotated[
    str,
    typer.Option("--shard", help="Part of the groups: 1/4 is the first quarter, 16:32 the groups 16 to 31."),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Override a parameter, as key.path=value; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object on stdout.")]

ARTIFACTS = Path("artifacts")
PARAMS = Path("params.yaml")
WHOLE = "1/1"
