// All nodes, and one of them: its state and why, its tests, its network, its faults and its incidents.
import { useMemo, useState } from "preact/hooks";
import { type FleetNodes, type NodeDetail, type NodeGpus, path, type Schemas, useLook } from "./api";
import { count, duration, short } from "./format";
import { IncidentTable, NodeButtons } from "./incidents";
import { Findings } from "./job_tabs";
import { NodeTimeline } from "./node_timeline";
import { Badge, Facts, Loading, link, Panel, Problem, Stat, Table, When } from "./parts";

const ROWS_MAX = 300;
const STATES = ["active", "spare", "cordoned", "lost", "left"];

export function NodesPage() {
  const look = useLook<FleetNodes>("v1/fleet/nodes", 5_000);
  return (
    <>
      <h1>Nodes</h1>
      <Problem text={look.problem} />
      {look.value ? <NodeList value={look.value} /> : !look.problem && <Loading what="the nodes" />}
    </>
  );
}

function NodeList({ value }: { value: FleetNodes }) {
  const [state, setState] = useState("any state");
  const [text, setText] = useState("");
  const [byFaults, setByFaults] = useState(false);
  const shown = useMemo(() => chosen(value, state, text, byFaults), [value, state, text, byFaults]);
  return (
    <>
      <dl class="stats">
        {STATES.map((name) => (
          <Stat key={name} label={name}>
            {value.state.filter((each) => each === name).length.toLocaleString("en")}
          </Stat>
        ))}
      </dl>
      <Panel
        title="List"
        aside={
          <form class="filters" onSubmit={(event) => event.preventDefault()}>
            <label>
              <span class="hidden">State</span>
              <select value={state} onChange={(event) => setState(event.currentTarget.value)}>
                {["any state", ...STATES].map((name) => (
                  <option key={name}>{name}</option>
                ))}
              </select>
            </label>
            <label>
              <span class="hidden">Search nodes</span>
              <input
                type="search"
                placeholder="Name, zone, job, reason"
                value={text}
                onInput={(event) => setText(event.currentTarget.value)}
              />
            </label>
            <label>
              <input
                type="checkbox"
                checked={byFaults}
                onChange={(event) => setByFaults(event.currentTarget.checked)}
              />{" "}
              Most faults first
            </label>
          </form>
        }
      >
        {shown.length ? (
          <Table label="Nodes" head={["Node", "State", "Job", "Zone", "#Faults a day", "Why"]}>
            {shown.slice(0, ROWS_MAX).map((n) => (
              <tr key={value.node[n]}>
                <th scope="row">
                  <a href={link("nodes", value.node[n]!)}>{value.node[n]}</a>
                </th>
                <td>
                  <Badge state={value.state[n]!} />
                  {!value.connected[n] && <small>not connected</small>}
                </td>
                <td>
                  {value.job[n] ? (
                    <a href={link("jobs", value.job[n]!)}>{value.job[n]}</a>
                  ) : (
                    <span class="quiet">none</span>
                  )}
                </td>
                <td>{value.zone[n]}</td>
                <td class="number">{value.faults_per_day[n]!.toFixed(4)}</td>
                <td>{value.reason[n]}</td>
              </tr>
            ))}
          </Table>
        ) : (
          <p class="empty">
            {value.node.length ? (
              "No node matches."
            ) : (
              <>
                There is no node. Start an agent on each: <code>holdfast agent</code>
              </>
            )}
          </p>
        )}
        {shown.length > ROWS_MAX && (
          <p class="quiet">
            The first {ROWS_MAX} of {count(shown.length, "node")}: search for the others.
          </p>
        )}
      </Panel>
    </>
  );
}

function chosen(value: FleetNodes, state: string, text: string, byFaults: boolean): number[] {
  const wanted = text.toLowerCase();
  const found = [...value.node.keys()].filter(
    (n) =>
      (state === "any state" || value.state[n] === state) &&
      `${value.node[n]} ${value.zone[n]} ${value.job[n]} ${value.reason[n]}`.toLowerCase().includes(wanted),
  );
  return byFaults ? found.sort((a, b) => value.faults_per_day[b]! - value.faults_per_day[a]!) : found;
}

export function NodePage({ name }: { name: string }) {
  const look = useLook<NodeDetail>(path("nodes", name), 3_000);
  const findings = useLook<Schemas["Page_Finding_"]>(`v1/findings?node=${encodeURIComponent(name)}`, 5_000);
  const node = look.value;
  if (look.missing) {
    return (
      <>
        <h1>{name}</h1>
        <p>
          There is no node {name}. <a href="#/nodes">The list</a> has those there are.
        </p>
      </>
    );
  }
  return (
    <>
      <h1>
        {name} {node && <Badge state={node.state} />}
      </h1>
      <Problem text={look.problem} />
      {!node ? (
        !look.problem && <Loading what="the node" />
      ) : (
        <>
          {node.reason && <p class="lead">{node.reason}</p>}
          <NodeButtons node={name} />
          <Panel title="Node">
            <NodeFacts node={node} />
          </Panel>
          <NodeTimeline node={node} findings={findings.value?.items ?? []} />
          <Gpus name={name} />
          <Tests value={node.preflight ?? null} />
          <Links items={node.links ?? []} />
          <Panel title="Findings">
            {findings.value ? (
              <Findings items={findings.value.items} />
            ) : findings.problem ? (
              <Problem text={findings.problem} />
            ) : (
              <Loading what="the findings" />
            )}
          </Panel>
          <Panel title="Incidents">
            <IncidentTable items={node.incidents} />
          </Panel>
        </>
      )}
    </>
  );
}

function NodeFacts({ node }: { node: NodeDetail }) {
  return (
    <Facts
      values={[
        ["Job", node.job ? <a href={link("jobs", node.job)}>{node.job}</a> : "none"],
        ["Control session", node.connected ? "connected" : "not connected"],
        ["Zone", node.zone],
        ["Pool", node.pool || "none"],
        ["Room for", count(node.capacity, "rank")],
        ["Host", `${node.hostname}, ${node.address}`],
        ["Version of its agent", node.version ?? ""],
        ["Faults a day, expected", node.faults_per_day.toFixed(4)],
        [
          "Faults on record",
          `${count(node.faults.length, "fault")}, weight ${node.faults_weigh} of ${node.quarantine_limit} before quarantine`,
        ],
        [
          "Telemetry",
          node.telemetry_cut_since ? (
            <>
              cut since <When at={node.telemetry_cut_since} />
            </>
          ) : (
            ""
          ),
        ],
        ["Held down", node.hold_until ? <When at={node.hold_until} /> : "no"],
        [
          "Probation",
          node.probation_until ? (
            <>
              ends <When at={node.probation_until} />
            </>
          ) : (
            "no"
          ),
        ],
        [
          "Maintenance",
          (node.notices ?? []).map((each) => `${each.event} (${each.source})`).join(", ") || "none is announced",
        ],
      ]}
    />
  );
}

function Gpus({ name }: { name: string }) {
  const look = useLook<NodeGpus>(path("nodes", name, "gpus"), 5_000, false);
  if (!look.value)
    return (
      <Panel title="GPUs">
        {look.problem ? <p class="empty">Not known: {look.problem}</p> : <Loading what="the GPUs" />}
      </Panel>
    );
  const items = look.value.gpus;
  if (!items.length)
    return (
      <Panel title="GPUs">
        <p class="empty">None, or its agent cannot read them.</p>
      </Panel>
    );
  return (
    <Panel title="GPUs">
      <Table
        label="GPUs"
        head={["#GPU", "#Temperature", "#Power", "#Memory used", "#Busy", "ECC errors", "Rows", "NVLinks", "PCIe"]}
      >
        {items.map((each) => (
          <Gpu key={each.gpu} value={each} />
        ))}
      </Table>
    </Panel>
  );
}

const known = (value: number | null, show: (value: number) => string) =>
  value === null ? <span class="quiet">not known</span> : show(value);

function Gpu({ value }: { value: Schemas["Gpu"] }) {
  const name = (
    <th scope="row" class="number" title={value.uuid}>
      {value.gpu}
    </th>
  );
  if (value.lost)
    return (
      <tr>
        {name}
        <td colSpan={8}>
          <Badge state="lost" /> its driver does not reach it
        </td>
      </tr>
    );
  return (
    <tr>
      {name}
      <td class="number nowrap">
        {known(value.temperature_c, (celsius) => `${Math.round(celsius)} °C`)}
        {value.margin_c !== null && <small>{Math.round(value.margin_c)} below slowdown</small>}
      </td>
      <td class="number nowrap">{known(value.power_w, (watts) => `${Math.round(watts)} W`)}</td>
      <td class="number nowrap">{known(value.memory_used, (bytes) => `${short(bytes)}B`)}</td>
      <td class="number">{known(value.utilization, (percent) => `${percent} %`)}</td>
      <td>
        {known(value.ecc_uncorrected, (errors) => `${errors.toLocaleString("en")} uncorrected`)}
        {!!value.ecc_uncorrected_ever && <small>{value.ecc_uncorrected_ever.toLocaleString("en")} in its life</small>}
        {!!value.ecc_corrected && <small>{value.ecc_corrected.toLocaleString("en")} corrected</small>}
      </td>
      <td>
        {known(value.remapped_rows, (rows) => `${rows} remapped`)}{" "}
        {value.remap_pending && <Badge state="reset needed" tone="busy" />}
        {value.remap_failed && <Badge state="no spare row" tone="bad" />}
      </td>
      <td>
        {known(value.nvlinks_up, (links) => `${links} up`)}{" "}
        {!!value.nvlinks_down && <Badge state={`${value.nvlinks_down} down`} tone="bad" />}
      </td>
      <td class="nowrap">
        {known(value.pcie_width, (lanes) => `×${lanes}`)}
        {value.pcie_width !== null && value.pcie_width_max !== null && value.pcie_width < value.pcie_width_max && (
          <small>of ×{value.pcie_width_max}</small>
        )}
        {!!value.pcie_replays && <small>{value.pcie_replays.toLocaleString("en")} replays</small>}
      </td>
    </tr>
  );
}

function Tests({ value }: { value: Schemas["Preflight"] | null }) {
  if (!value) return null;
  const took = value.at ? `took ${duration(value.duration_s)}` : "";
  return (
    <Panel
      title="Its tests of itself"
      aside={<Badge state={value.at ? (value.passed ? "passed" : "failed") : "under way"} />}
    >
      <p class="quiet">
        {value.at ? <When at={value.at} /> : "Under way"} {took}
      </p>
      <Table label="Tests" head={["Test", "Result", "Detail"]}>
        {value.checks.map((check) => (
          <tr key={check.name}>
            <th scope="row">{check.name}</th>
            <td>
              <Badge
                state={check.ok === null ? "not tested" : check.ok ? "passed" : "failed"}
                tone={check.ok === null ? "off" : check.ok ? "ok" : "bad"}
              />
            </td>
            <td>{check.detail}</td>
          </tr>
        ))}
      </Table>
    </Panel>
  );
}

function Links({ items }: { items: Schemas["LinkTest"][] }) {
  if (!items.length) return null;
  const rate = (value: number) => `${short(value)}B/s`;
  return (
    <Panel title="Tests of its network">
      <Table label="Tests of the network" head={["When", "With", "Verdict", "#Out", "#In", "#Round trip", "#Others"]}>
        {[...items].reverse().map((each) => (
          <tr key={`${each.at} ${each.partner}`}>
            <td class="nowrap">
              <When at={each.at} />
            </td>
            <td>
              <a href={link("nodes", each.partner)}>{each.partner}</a>
            </td>
            <td>
              <Badge state={each.verdict} />
              {each.failure && <small>{each.failure}</small>}
            </td>
            <td class="number">{each.failure ? "–" : rate(each.out_bytes_per_s)}</td>
            <td class="number">{each.failure ? "–" : rate(each.in_bytes_per_s)}</td>
            <td class="number">{each.failure ? "–" : duration(each.round_trip_s)}</td>
            <td class="number">
              {each.expected_bytes_per_s === null ? (
                <span class="quiet">not known</span>
              ) : (
                rate(each.expected_bytes_per_s)
              )}
            </td>
          </tr>
        ))}
      </Table>
    </Panel>
  );
}
