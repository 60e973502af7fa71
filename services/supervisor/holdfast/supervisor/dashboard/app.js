// The dashboard: reads the REST API, looks again whenever the event stream says that something has changed.
// Everything from the API goes through textContent: a job's name or a script's exception is never markup.

const REFRESH_MS = 1000; // steps and losses are no events
const AT_ONCE_MS = 50; // events come in bursts
const PAGE = 500;

const byId = (id) => document.getElementById(id);
const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

async function get(path) {
  const token = sessionStorage.getItem("token");
  const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {} });
  if (answer.status === 401) {
    const given = window.prompt("This API wants its HOLDFAST_API_TOKEN");
    if (given) sessionStorage.setItem("token", given);
  }
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail ?? answer.statusText);
  return body;
}

function mesh(job) {
  const grid = element("div", "", "mesh");
  const width = Math.max(1, job.ranks.length / (job.mesh.dp ?? 1));
  grid.style.gridTemplateColumns = `repeat(${width}, auto)`;
  for (const rank of job.ranks) {
    grid.append(element("span", `rank ${rank.rank} · ${rank.node}`, `cell ${rank.state}`));
  }
  return grid;
}

function showJob(job) {
  const section = element("article");
  const title = element("h2", `${job.name} `);
  title.append(element("span", job.phase, `cell ${job.phase}`));
  const shape = Object.entries(job.mesh).map(([name, size]) => `${name} ${size}`).join(" × ");
  const numbers = [`generation ${job.generation}`, shape, `step ${job.step}`];
  if (job.loss !== null) numbers.push(`loss ${job.loss.toFixed(4)}`);
  if (job.tokens_per_s !== null) numbers.push(`${Math.round(job.tokens_per_s).toLocaleString()} tokens/s`);
  section.append(title, element("p", numbers.join("   ·   ")), element("p", job.reason, "quiet"), mesh(job));
  if (job.suspended) section.append(element("p", suspended(job.suspended)));
  if (job.incident) section.append(element("p", `now: ${job.incident.cause}`));
  return section;
}

function suspended(at) {
  const tiers = Object.entries(at.tiers).filter(([, ranks]) => ranks);
  const where = tiers.map(([name, ranks]) => (ranks === true ? name : `${name} of ${count(ranks, "rank")}`)).join(", ");
  const since = new Date(at.since * 1000).toLocaleString();
  return `suspended since ${since}; ${at.step ? `goes on from step ${at.step}, saved in: ${where}` : "no checkpoint is saved"}`;
}

function spare(node) {
  const standing = node.probation_until ? ", on probation" : node.hold_until ? ", on hold" : "";
  const made = element("span", `${node.node} ${node.state}${standing}`, `cell ${node.state}`);
  made.title = node.reason;
  return made;
}

function showIncident(incident) {
  const row = element("tr");
  const took = incident.t_first_step ? `${(incident.t_first_step - incident.t_fault).toFixed(2)} s` : "–";
  const state = element("td");
  state.append(element("span", incident.state, `cell ${incident.state}`));
  row.append(
    element("td", new Date(incident.t_fault * 1000).toLocaleTimeString()),
    element("td", incident.job),
    element("td", incident.cause),
    element("td", incident.action?.kind.replace("_", " ") ?? "–"),
    element("td", incident.action?.reason ?? ""),
    state,
    element("td", took),
  );
  return row;
}

async function refresh() {
  const [jobs, nodes, incidents] = await Promise.all([
    get(`v1/jobs?limit=${PAGE}`),
    get(`v1/nodes?limit=${PAGE}`),
    get("v1/incidents?limit=50"),
  ]);
  const whole = await Promise.all(jobs.items.map((job) => get(`v1/jobs/${encodeURIComponent(job.name)}`)));
  byId("jobs").replaceChildren(...whole.map(showJob));
  const others = nodes.items.filter((node) => !node.job);
  byId("others").replaceChildren(...others.map(spare));
  byId("incidents").replaceChildren(...incidents.items.map(showIncident));
  byId("status").textContent = `${count(jobs.items.length, "job")}, ${count(nodes.items.length, "node")}`;
}

let timer;
let busy = false;

async function look() {
  clearTimeout(timer);
  if (busy) return;
  busy = true;
  try {
    await refresh();
  } catch (error) {
    byId("status").textContent = `no answer: ${error.message}`;
  }
  busy = false;
  timer = setTimeout(look, REFRESH_MS);
}

function soon() {
  clearTimeout(timer);
  timer = setTimeout(look, AT_ONCE_MS);
}

const kinds = ["JobChanged", "GenerationChanged", "IncidentChanged", "NodeChanged"];
const source = new EventSource("v1/events"); // with a token configured it stays closed, and the timer alone refreshes
for (const kind of kinds) source.addEventListener(kind, soon);
look();
