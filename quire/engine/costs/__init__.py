"""How long steps take, learned from real steps: `step_costs` of all, `prompt_costs` of those with prompt tokens."""
