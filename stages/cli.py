"""`wcpipe`: all stage commands under one name.

Command modules import only typer at their top and everything heavy inside, so `wcpipe --help` answers at once and
never imports torch. An error that a person can act on is one line on stderr and an exit code of its own
(`pipeline.errors`); anything else is a bug and shows its traceback.
"""

import logging
import sys
from typing import NoReturn

import typer

from stages import (
    advantage,
    base,
    calibrate,
    cluster,
    doctor,
    encode,
    evaluate,
    hacks,
    import_,
    prefix,
    pretrain,
    preview,
    report,
    rollout,
    run,
    score,
    scorers,
    update,
    verify,
)
from stages.launch import launchable

LAUNCHABLE = ("base", "prefix", "rollout", "score", "advantage", "update", "evaluate", "report")

app = typer.Typer(
    name="wcpipe",
    help="Post-train interactive video world models with reinforcement learning, one command a stage.",
    epilog="Order of an epoch: prefix, rollout, score, advantage, update. `wcpipe run` does them all.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for name, module in (
    ("base", base),
    ("prefix", prefix),
    ("rollout", rollout),
    ("score", score),
    ("advantage", advantage),
    ("update", update),
    ("run", run),
    ("evaluate", evaluate),
    ("report", report),
    ("preview", preview),
    ("calibrate", calibrate),
    ("hacks", hacks),
    ("pretrain", pretrain),
    ("import", import_),
    ("encode", encode),
    ("verify", verify),
    ("doctor", doctor),
):
    app.command(name)(launchable(name, module.command) if name in LAUNCHABLE else module.command)
app.add_typer(cluster.app, name="cluster")
app.add_typer(scorers.app, name="scorers")


def main() -> NoReturn:
    """Run the command line and exit with the documented code."""
    from pipeline.errors import WcpipeError
    from stages.common import STOP

    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    STOP.install()
    try:
        app()
    except WcpipeError as error:
        print(f"wcpipe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("wcpipe: interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
