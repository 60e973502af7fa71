"""The trainings of the frameworks' recovery benchmark: one small MLP, one script per framework."""
