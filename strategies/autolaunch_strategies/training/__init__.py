"""What training needs beside its axes: recomputation, compilation, optimizers that work on parts."""
