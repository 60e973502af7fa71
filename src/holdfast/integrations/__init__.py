"""Training frameworks, each in a module of its own that imports its framework: `holdfast.integrations.transformers` and others;
and experiment loggers (`holdfast.integrations.loggers`).

Nothing of Holdfast imports them: a script that uses one does. A framework's module is a thin adapter over
`holdfast.train.attach`. It uses internals of its framework, so it checks their signatures when it is attached (`tested`), and
refuses by name what it does not know."""
