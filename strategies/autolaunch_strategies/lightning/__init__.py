"""The Trainer's side: `MeshStrategy` for unmodified LightningModules.

`strategy` answers lightning by what it holds: a `place`, `collectives`, `checkpoints`, and `staged_steps` that run a
module's steps under a pipeline. `relay` shows every rank what the last stage logs (`logs`), collects (`metrics`) and
answers to hooks (`hooks`).
"""
