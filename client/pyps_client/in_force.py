"""What a session tells of the run: the terms in force, and how far it is."""

from __future__ import annotations

from pyps_client.run_state import View


class InForce:
    """The terms as server 0 last told them: known after `connect`, and they may change while the run goes on."""

    view: View

    @property
    def protocol(self) -> str:
        """The protocol in force ("async"), known after `connect`. It may change while the run goes on."""
        return self.view.state.terms.protocol

    @property
    def staleness(self) -> str:
        """The staleness policy in force ("divide"); as `protocol`."""
        return self.view.state.terms.staleness

    @property
    def batch_size(self) -> int:
        """Examples in a minibatch, as the servers' schedule asks for them now; 0 where they have none."""
        return self.view.state.terms.batch_size

    @property
    def accumulate(self) -> int:
        """Minibatches that the protocol wants summed in a push; 0 leaves it to the worker."""
        return self.view.state.terms.accumulate

    @property
    def ask_to_proceed(self) -> bool:
        """Whether the protocol in force grants steps one by one, so that `proceed` asks and may wait."""
        return self.view.state.terms.ask_to_proceed

    @property
    def current_version_only(self) -> bool:
        """Whether the protocol refuses gradients of older versions, so that nobody must compute ahead."""
        return self.view.state.terms.current_version_only

    @property
    def gives_out_data(self) -> bool:
        """Whether the protocol in force hands out data and parameters under one mutex (asgd, on one server)."""
        name, _, settings = self.protocol.partition(":")
        return name == "asgd" and "mutex=shard" not in settings

    @property
    def global_step(self) -> int:
        """Updates of the whole run: the largest shard version seen so far."""
        return self.view.state.global_step

    @property
    def num_workers(self) -> int:
        """Live workers, as the servers last said."""
        return self.view.state.num_workers

    @property
    def finished(self) -> bool:
        """True when the run is over: pulls still work, a push raises RunFinished."""
        return self.view.state.finished

    @property
    def refused(self) -> dict[str, int]:
        """Pushed shards that servers did not take, by the reason's name: {"STALE": 3}."""
        return self.view.refusals.counts
