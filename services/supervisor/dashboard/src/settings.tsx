// What answers here: versions, the leader, the event log, the breaker and the bridge to Kubernetes; sign-out.

import { ActionButton } from "./action";
import { request, type Schemas, useLook } from "./api";
import { absolute } from "./format";
import { Badge, Facts, Loading, Panel, Problem, Table, When } from "./parts";

export function SettingsPage() {
  const version = useLook<Schemas["Version"]>("v1/version", 10_000);
  const session = useLook<Schemas["Session"]>("v1/session", 60_000, false);
  const breaker = useLook<Schemas["Breaker"]>("v1/breaker", 5_000);
  const kubernetes = useLook<Schemas["Kubernetes"]>("v1/kubernetes", 10_000);
  const signOut = async () => {
    await request("DELETE", "v1/session");
    location.reload();
  };
  const value = version.value;
  return (
    <>
      <h1>Settings</h1>
      <Problem text={version.problem ?? breaker.problem} />
      <Panel title="Supervisor">
        {value ? (
          <Facts
            values={[
              ["Version", value.version],
              ["Protocol of agents", value.protocol_version],
              ["This supervisor", `${value.supervisor} (${value.leader ? "leads" : "stands by"})`],
              ["API of the leader", value.leader_api],
              ["Epoch of the leader", value.epoch],
              ["Event log", value.event_log || "does not answer"],
            ]}
          />
        ) : (
          <Loading what="the version" />
        )}
        <p>
          <a href="docs">Reference of the REST API</a>
        </p>
      </Panel>
      <BreakerPanel value={breaker.value} />
      <Panel title="Session">
        <p>
          {!session.value?.required
            ? "This API has no token: whoever reaches it can use it."
            : session.value.signed_in
              ? `Signed in as ${session.value.name}, with role ${session.value.role}. `
              : "Not signed in. "}
          {session.value?.until && (
            <>
              The session ends <When at={session.value.until} />.
            </>
          )}
        </p>
        {session.value?.until && (
          <button type="button" onClick={signOut}>
            Sign out
          </button>
        )}
      </Panel>
      {mayAskForPeople(session.value) && <PeoplePanels />}
      {kubernetes.value?.watch && (
        <Panel title="Kubernetes">
          <ul>
            {kubernetes.value.watched.map((each) => (
              <li key={each.what}>
                {each.what}: {each.problem || "seen"}, last confirmed <When at={each.confirmed_at} />
              </li>
            ))}
          </ul>
        </Panel>
      )}
    </>
  );
}

/** The API tells operators and admins, and everybody if it has no tokens. */
const mayAskForPeople = (session: Schemas["Session"] | null) =>
  session !== null && (!session.required || session.role === "operator" || session.role === "admin");

function PeoplePanels() {
  const { value, problem } = useLook<Schemas["People"]>("v1/people", 60_000);
  if (!value) return <Problem text={problem} />;
  return (
    <>
      <Panel title="Tokens">
        <p>
          {value.admin_token ? "HOLDFAST_API_TOKEN is set: its owner is an admin. " : ""}
          {value.tokens.length
            ? ""
            : "No tokens with roles. Make some in a terminal: holdfast tokens create NAME --role viewer"}
        </p>
        {value.tokens.length > 0 && (
          <Table label="Tokens" head={["Name", "Role", "Made", "Ends"]}>
            {value.tokens.map((each) => (
              <tr key={each.name}>
                <td>{each.name}</td>
                <td>{each.role}</td>
                <td>
                  <When at={each.created_at} />
                </td>
                <td>{!each.valid ? "has ended" : each.expires_at ? absolute(each.expires_at) : "never"}</td>
              </tr>
            ))}
          </Table>
        )}
      </Panel>
      {value.oidc && (
        <Panel title="OpenID Connect">
          <Facts
            values={[
              ["Issuer", value.oidc.issuer],
              ["Audience", value.oidc.audiences.join(" or ")],
              ["Roles", value.oidc.roles.join(", ")],
            ]}
          />
        </Panel>
      )}
      <Panel title="Alerts">
        {value.alert_addresses.length ? (
          <>
            <Facts
              values={[
                ["Addresses", value.alert_addresses.join(", ")],
                ["About", value.alert_topics.join(", ")],
              ]}
            />
            <p>
              A test: <code>holdfast notify test</code>
            </p>
          </>
        ) : (
          <p>No alerts are sent: HOLDFAST_ALERT_URLS is not set.</p>
        )}
      </Panel>
    </>
  );
}

export function BreakerPanel({ value }: { value: Schemas["Breaker"] | null }) {
  if (!value) return null;
  return (
    <Panel title="Breaker" aside={<Badge state={value.state} />}>
      <p>
        {value.state === "closed"
          ? "Faults are acted on."
          : `Open: the supervisor records faults and does not act on them. ${value.reason}`}
      </p>
      <Facts
        values={[
          ["Changes of generation in its window", value.changes],
          ["Nodes that failed in its window", value.failed_nodes.join(", ") || "none"],
          ...(value.open_until
            ? [["Closes by itself", <When at={value.open_until} />] as [string, preact.JSX.Element]]
            : []),
        ]}
      />
      {value.state === "open" && (
        <ActionButton
          action={() => ({
            label: "Reset the breaker",
            will: "Its counts are cleared, and the supervisor acts on faults again. Deferred incidents are decided now.",
            cli: "holdfast breaker reset",
            url: "v1/breaker/reset",
            body: { reason: "reset on the dashboard" },
          })}
        >
          Reset
        </ActionButton>
      )}
    </Panel>
  );
}
