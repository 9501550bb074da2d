"""What was typed and what lies in conf/, as one checked config. All that speaks with Hydra is here; imports no torch.

`command_line` reads what was typed, `compose` composes it with conf/ and `sources`, `schema` is what must come out;
`against_schema` checks keys one by one, `across_keys` what shows only in several at once, or on the machine.
"""
