"""The Hugging Face Trainer on parameter servers."""

from __future__ import annotations

from typing import Any

from pyps_client.torch.remote_optimizer import RemoteOptimizer

__all__ = ["remote_trainer"]


def remote_trainer(trainer: Any = None, **settings: Any) -> Any:
    """Return a class like `trainer` whose optimizer's updates run on parameter servers, and which ends with the run.

        RemoteTrainer = remote_trainer(overlap="step")
        RemoteTrainer(model, args, train_dataset=part).train()

    The Trainer makes its optimizer by its arguments (`optim="adamw_torch"`, `learning_rate`, `weight_decay`), or by
    its `create_optimizer`. The new class has the RemoteOptimizer as `remote`.

    `trainer`: a subclass of transformers.Trainer; by default that class itself. `settings`: RemoteOptimizer's keywords.
    """
    import transformers

    class EndOfRun(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            control.should_training_stop |= optimizer.optimizer.finished

    class RemoteTrainer(trainer or transformers.Trainer):  # type: ignore[misc]
        remote: RemoteOptimizer

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, "remote"):
                made = super().create_optimizer(*args, **kwargs)
                # The group without weight decay is empty where a model has no biases and norms.
                made.param_groups[:] = [group for group in made.param_groups if group["params"]]
                self.optimizer = self.remote = RemoteOptimizer(self.model, made, **settings)
                self.remote.examples_in_batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
                self.add_callback(EndOfRun())
            return self.optimizer

    return RemoteTrainer
