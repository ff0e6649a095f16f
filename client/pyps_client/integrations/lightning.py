"""Lightning on parameter servers."""

from __future__ import annotations

from typing import Any

from pyps_client.torch.remote_optimizer import RemoteOptimizer
from pyps_wire.errors import InvalidArgument

__all__ = ["parameter_servers"]


def parameter_servers(**settings: Any) -> Any:
    """Return a callback that makes a RemoteOptimizer of the module's optimizer, and ends the fit with the run.

        trainer = lightning.Trainer(devices=1, callbacks=[parameter_servers(overlap="step")])

    `configure_optimizers` stays as it is, schedulers included; it must return one optimizer. The callback has the
    RemoteOptimizer as `remote`. `settings`: the keywords of RemoteOptimizer.
    """
    import lightning

    class ParameterServers(lightning.Callback):  # type: ignore[misc]
        remote: RemoteOptimizer

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            if stage == "fit":
                configure = module.configure_optimizers
                module.configure_optimizers = lambda: self._on_servers(module, configure())

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            # Lightning calls no teardown then.
            self.teardown(trainer, module, "fit")

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            vars(module).pop("configure_optimizers", None)

        def on_train_start(self, *_: Any) -> None:
            # Lightning clears gradients after the first forward pass, and has loaded its checkpoint by now.
            self.remote.join()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= self.remote.finished

        def _on_servers(self, module: Any, configured: Any) -> Any:
            schedulers: Any = []
            if isinstance(configured, dict):
                schedulers, configured = configured.get("lr_scheduler", []), configured["optimizer"]
            elif isinstance(configured, list | tuple) and configured and isinstance(configured[0], list | tuple):
                configured, schedulers = configured
            optimizers = configured if isinstance(configured, list | tuple) else [configured]
            if len(optimizers) != 1:
                raise InvalidArgument(
                    f"configure_optimizers returned {len(optimizers)} optimizers; a run has one: give it all "
                    "parameters, in groups."
                )
            self.remote = RemoteOptimizer(module, optimizers[0], **settings)
            schedulers = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
            for each in schedulers:
                scheduler = each["scheduler"] if isinstance(each, dict) else each
                # The groups are the same; Lightning refuses a scheduler of another optimizer.
                scheduler.optimizer = self.remote
            return [self.remote], list(schedulers)

    return ParameterServers()
