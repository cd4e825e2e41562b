"""What a module holds at one moment, to be compared with what it holds later, and to be restored."""

from __future__ import annotations

from torch import nn

from nimble_jobs.engine.attributes import Attributes
from nimble_jobs.engine.contents import Contents
from nimble_jobs.engine.state import Snapshot


class Held:
    """A module's tensors, with copies of those that are no parameters, its attributes, and what its containers hold."""

    def __init__(self, module: nn.Module) -> None:
        contents = Contents(module)
        self.snapshot = Snapshot(module, contents)
        self.attributes = Attributes(contents)
        self._identities = contents.identities()

    def differing_tensor(self, contents: Contents) -> str | None:
        """The name of a tensor that is another one in the module's present `contents`, or holds other values."""
        now = contents.identities()
        for name in (*self._identities, *now):
            if self._identities.get(name) != now.get(name):
                return name
        return self.snapshot.resized() or next(iter(self.snapshot.changing(containers=True)), None)
