"""The command line: ``python -m vgen.run`` and ``vgen``. Nothing that others import lives here."""

from typing import Any

import hydra

from vgen import app


@hydra.main(version_base="1.3", config_path=app.conf_dir(), config_name="config")
def _job(composed: Any) -> float | None:
    return app.run_job(composed)


def main() -> None:
    app.main(_job)


if __name__ == "__main__":
    main()
