"""Theory: what a chain of models should give, by formula (``closed_form``) and by simulation (``simulator``), and how both
compare with published runs (``traces``). numpy and the native core only, no torch."""
