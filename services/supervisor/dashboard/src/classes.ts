// The classes of goodput and badput in the order in which bars stack them; style.css has a colour for each.
export const CLASSES = [
  "useful",
  "running",
  "startup",
  "detect",
  "decide",
  "recover",
  "rework",
  "stall",
  "wait",
  "degraded",
  "other",
] as const;

export const MEANING: Record<string, string> = {
  useful: "new steps at the fault-free rate",
  running: "all ranks run; the script reports no steps",
  startup: "before the first step",
  detect: "from the fault to its finding",
  decide: "from the finding to the decision",
  recover: "from the decision to the next step",
  rework: "steps done again",
  stall: "copying checkpoints",
  wait: "no nodes to run on",
  degraded: "fewer replicas than the full mesh",
  other: "none of these: slow steps, evaluation, data",
};
