"""`invrl serve`: engines, router and gateway without a trainer."""

from collections.abc import Sequence

from invrl.cli.run_process import checked_configuration, failure_reported, log_to_folder
from invrl.host import interrupts
from invrl.run.settings.folder import hold_run_folder


def serve(arguments: Sequence[str]) -> None:
    """usage: invrl serve --model-path FOLDER [flags]

    Starts engines, router and gateway; prints the base URL, an environment key and a
    session key that is ready to use.

    example:
      invrl serve --model-path MODEL --gateway-port 8000"""
    config = checked_configuration(arguments, command="serve")
    # No supervisor: this command starts no Ray, and the kernel (or the guardian) ends
    # what it starts.
    with hold_run_folder(config, "serve") as folder:
        log_to_folder(folder, config)
        with failure_reported(folder):
            from invrl.run.serve import serve as serve_model

            interrupts.run(serve_model(config, folder))
