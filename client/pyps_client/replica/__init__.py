"""Model parallelism: several processes, each with a part of the model, that are one worker of a run."""
