// The tabs of a job's page.
import { useState } from "preact/hooks";
import { path, type RankColumns, type Schemas, type Timeline, useLook } from "./api";
import { count, duration, quoted, shape, words } from "./format";
import { RANK_TONES } from "./mesh";
import { Badge, Code, Facts, Loading, link, Problem, Table, When } from "./parts";

const ROWS_MAX = 200;

export function RanksTab({ value }: { value: RankColumns | null }) {
  const [only, setOnly] = useState(false);
  if (!value) return <Loading what="the ranks" />;
  if (!value.state.length) return <p class="empty">No rank is placed.</p>;
  const alive = value.states.indexOf("alive");
  const shown: number[] = [];
  let wanted = 0;
  value.state.forEach((state, rank) => {
    if (only && state === alive) return;
    wanted += 1;
    if (shown.length < ROWS_MAX) shown.push(rank);
  });
  return (
    <>
      <label>
        <input type="checkbox" checked={only} onChange={(event) => setOnly(event.currentTarget.checked)} /> Only ranks
        that are not alive
      </label>
      {shown.length ? (
        <Table label="Ranks" head={["Rank", "Node", "State", "Process started", "#Faults a day of the node"]}>
          {shown.map((rank) => {
            const node = value.nodes[value.node[rank]!]!;
            const state = value.states[value.state[rank]!]!;
            const age_s = value.age_s[rank]!;
            return (
              <tr key={rank}>
                <th scope="row">{rank}</th>
                <td>
                  <a href={link("nodes", node)}>{node}</a>
                </td>
                <td>
                  <Badge state={state} tone={RANK_TONES[state]!} />
                </td>
                <td>{age_s < 0 ? <span class="quiet">not known</span> : `${duration(age_s)} ago`}</td>
                <td class="number">{value.faults_per_day[value.node[rank]!]!.toFixed(4)}</td>
              </tr>
            );
          })}
        </Table>
      ) : (
        <p class="empty">Every rank is alive.</p>
      )}
      {wanted > shown.length && (
        <p class="quiet">
          The first {shown.length} of {count(wanted, "rank")}.
        </p>
      )}
    </>
  );
}

export function CheckpointsTab({ name }: { name: string }) {
  const look = useLook<Schemas["Page_Checkpoint_"]>(path("jobs", name, "checkpoints"), 5_000);
  if (!look.value) return look.problem ? <Problem text={look.problem} /> : <Loading what="the checkpoints" />;
  const items = look.value.items;
  if (!items.length) return <p class="empty">No checkpoint is known on a node or in the object store.</p>;
  const tiers = Object.keys(items[0]!.tiers);
  return (
    <Table label="Checkpoints" head={["Step", "Attempt", "State", "Mesh", ...tiers]}>
      {items.slice(0, ROWS_MAX).map((each) => {
        const ranks = Object.values(each.mesh).reduce((product, size) => product * size, 1);
        return (
          <tr key={`${each.attempt} ${each.step}`}>
            <th scope="row">{each.step.toLocaleString("en")}</th>
            <td>{each.attempt}</td>
            <td>
              <Badge
                state={each.newest ? "newest complete" : each.complete ? "complete" : "incomplete"}
                tone={each.complete ? "ok" : "busy"}
              />
              {each.needed && <small>needed: the job may go back to it</small>}
            </td>
            <td class="nowrap">{shape(each.mesh)}</td>
            {tiers.map((tier) => (
              <td key={tier}>
                <Tier held={each.tiers[tier]!} ranks={ranks} />
              </td>
            ))}
          </tr>
        );
      })}
    </Table>
  );
}

export function Tier({ held, ranks }: { held: number | boolean; ranks: number }) {
  if (held === true || held === ranks)
    return <Badge state={held === true ? "all" : `all ${count(ranks, "rank")}`} tone="ok" />;
  return held ? <Badge state={`${held} of ${count(ranks, "rank")}`} tone="busy" /> : <span class="quiet">none</span>;
}

export function FindingsTab({ name }: { name: string }) {
  const look = useLook<Schemas["Page_Finding_"]>(`v1/findings?job=${encodeURIComponent(name)}`, 5_000);
  if (!look.value) return look.problem ? <Problem text={look.problem} /> : <Loading what="the findings" />;
  return <Findings items={look.value.items} />;
}

export function Findings({ items }: { items: Schemas["Finding"][] }) {
  if (!items.length) return <p class="empty">Nothing was found.</p>;
  return (
    <Table label="Findings" head={["When", "Finding", "Severity", "#Confidence", "What became of it"]}>
      {items.map((each) => (
        <tr key={each.id}>
          <td class="nowrap">
            <When at={each.at} />
          </td>
          <td>
            {each.summary}
            <small>
              {words(each.kind)}
              {each.node && `, ${each.node}`}
              {each.rank !== null && `, rank ${each.rank}`}
              {each.gpu !== null && `, GPU ${each.gpu}`}
            </small>
          </td>
          <td>
            <Badge state={each.severity} />
          </td>
          <td class="number">{Math.round(each.confidence * 100)} %</td>
          <td>
            {each.verdict} {each.incident && <a href={link("incidents", each.incident)}>Incident</a>}
          </td>
        </tr>
      ))}
    </Table>
  );
}

export function PolicyTab({ name }: { name: string }) {
  const look = useLook<Schemas["holdfast__supervisor__api__job_models__Policy"]>(path("jobs", name, "policy"), 10_000);
  if (!look.value) return look.problem ? <Problem text={look.problem} /> : <Loading what="the policy" />;
  const policy = look.value;
  return (
    <>
      <Facts
        values={[
          ["Policy", policy.name || "the default policy"],
          ["Decides since", policy.since ? <When at={policy.since} /> : "longer than the history reaches back"],
          ["SHA-256", policy.sha256 || "no text"],
          ["Parameters", Object.keys(policy.params).length ? JSON.stringify(policy.params) : "none"],
          ["Before it", policy.before.map((each) => each.name || "the default policy").join(", ") || "none"],
        ]}
      />
      {policy.source && <Code label="Text of the policy">{policy.source}</Code>}
      <p class="quiet">To change it, after a dry run against recorded incidents:</p>
      <pre class="command">{`holdfast policy set ${quoted(name)} FILE`}</pre>
    </>
  );
}

export function GenerationsTab({ value }: { value: Timeline | null }) {
  if (!value) return <Loading what="the attempts" />;
  const rows = value.generations.filter((each) => ["planned", "stepping", "ended"].includes(each.stage)).reverse();
  if (!rows.length) return <p class="empty">No generation was planned.</p>;
  return (
    <>
      <p class="quiet">
        Every change of nodes or processes is a generation. A return to a saved step begins a new attempt.
      </p>
      <Table label="Attempts and generations" head={["When", "Attempt", "Generation", "Stage", "#Ranks", "Why"]}>
        {rows.slice(0, ROWS_MAX).map((each, n) => (
          <tr key={n}>
            <td class="nowrap">
              <When at={each.at} />
            </td>
            <td>{each.attempt}</td>
            <td>{each.generation}</td>
            <td>
              <Badge
                state={each.stage}
                tone={each.stage === "stepping" ? "ok" : each.stage === "ended" ? "off" : "busy"}
              />
            </td>
            <td class="number">{each.ranks.toLocaleString("en")}</td>
            <td>{each.reason}</td>
          </tr>
        ))}
      </Table>
    </>
  );
}
