"""Stands in for the process that measures one model: it answers, dies, hangs or faults, as the model is called."""

from __future__ import annotations

import json
import os
import sys
import time

from nimble_jobs.bench.request import FAMILIES
from tests.bench_samples import ENVIRONMENT, row


def main() -> None:
    pipe = os.fdopen(int(sys.argv[1]), "w")
    options = json.loads(sys.argv[2])

    def say(message: object) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    device = options["device"]
    say({"environment": ENVIRONMENT if device == "auto" else {**ENVIRONMENT, "device": device}, "cuda": False})
    for line in sys.stdin:
        unit = json.loads(line)
        print("measuring", unit["model"], flush=True)
        name, family = unit["model"].partition(":")[2], unit["family"]
        values = {k: unit[k] for k in ("dtype", "batch", "layout")}
        systems = FAMILIES[family]
        for position, system in enumerate(systems):
            if name == "dies" and position == len(systems) - 1:
                print("cannot go on", flush=True)
                os._exit(3)
            if name == "hangs" and position == len(systems) - 1:
                time.sleep(600)
            say({"row": vars(row(unit["model"], system, replay_us=float(os.getpid()), **values))})
        say({"done": True, "spent": name == "faults"})


if __name__ == "__main__":
    main()
