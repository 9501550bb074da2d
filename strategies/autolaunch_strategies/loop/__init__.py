"""Plain training loops: `parallelize`, a mesh of their own, `forward_backward` of a staged batch."""
