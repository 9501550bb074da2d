"""The Trainer's side: `MeshStrategy` for unmodified LightningModules.

`strategy` is composed of a place, collectives and checkpoints; `staged_steps` runs a module's steps under a pipeline,
`relay` shows every rank what the last stage logs (`logs`), collects (`metrics`) and answers to hooks (`hooks`).
"""
