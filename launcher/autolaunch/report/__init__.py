"""What a person sees of a run and of a plan, and what is written about it.

On the terminal: `screen` (the panels of a run and of a plan), `progress`, `choice_screen` (what the planner chose), all
of them on a `page`, all numbers as in `readable`. In files: `metrics_csv`, `summary`, `plan_file`, and the planner's
choice as one page with pictures (`choice_html`), drawn with `svg`, as a schedule is (`schedule_svg`).
"""
