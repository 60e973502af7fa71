// The shell: header, navigation by the hash of the address, sign-in, and the page that the address names.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get, listen, request, type Schemas, whenSignedOut } from "./api";
import { CheckpointsPage } from "./checkpoints";
import { FleetPage } from "./fleet";
import { IncidentPage, IncidentsPage } from "./incidents";
import { JobPage } from "./job";
import { NodePage, NodesPage } from "./nodes";
import { Loading } from "./parts";
import { FleetReportPage } from "./report";
import { SettingsPage } from "./settings";
import { SignIn } from "./signin";
import "uplot/dist/uPlot.min.css";
import "./style.css";

const PAGES = [
  ["", "Fleet"],
  ["incidents", "Incidents"],
  ["nodes", "Nodes"],
  ["checkpoints", "Checkpoints"],
  ["report", "Report"],
  ["settings", "Settings"],
] as const;

const SIGN_IN = "#token=";

/** Signs in by a link of `holdfast dashboard`: what stands behind the # is sent to no server, and leaves the address at once. */
async function signInByLink() {
  if (!location.hash.startsWith(SIGN_IN)) return;
  const token = decoded(location.hash.slice(SIGN_IN.length));
  history.replaceState(null, "", location.pathname);
  await request("POST", "v1/session", { token }).catch(() => {}); // then the form asks for another one
}

const address = () => location.hash.replace(/^#\/?/, "").split("/").map(decoded);

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // typed by hand
  }
}

function Page({ parts: [page = "", name = "", tab = ""] }: { parts: string[] }) {
  switch (page) {
    case "":
      return <FleetPage />;
    case "jobs":
      return name ? <JobPage key={name} name={name} tab={tab} /> : <FleetPage />;
    case "incidents":
      return name ? <IncidentPage key={name} id={name} /> : <IncidentsPage />;
    case "nodes":
      return name ? <NodePage key={name} name={name} /> : <NodesPage />;
    case "checkpoints":
      return <CheckpointsPage />;
    case "report":
      return <FleetReportPage />;
    case "settings":
      return <SettingsPage />;
    default:
      return (
        <p>
          There is no page {page} here. <a href="#/">The fleet</a> is the first one.
        </p>
      );
  }
}

function App() {
  const [parts, setParts] = useState(() => (location.hash.startsWith(SIGN_IN) ? [""] : address()));
  const [signedIn, setSignedIn] = useState<boolean | null>(null);
  useEffect(() => {
    const moved = () => {
      setParts(address());
      document.getElementById("main")?.focus();
    };
    addEventListener("hashchange", moved);
    whenSignedOut(() => setSignedIn(false));
    const session = signInByLink().then(() => get<Schemas["Session"]>("v1/session"));
    session.then(
      (session) => setSignedIn(session.signed_in),
      () => setSignedIn(true), // the page says by itself that there is no answer
    );
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    if (signedIn) listen();
  }, [signedIn]);
  const here = parts[0] === "jobs" ? "" : parts[0];
  const title = parts[1] || PAGES.find(([page]) => page === here)?.[1] || "";
  useEffect(() => {
    document.title = title ? `${title} · Holdfast` : "Holdfast";
  }, [title]);
  return (
    <>
      <button type="button" class="skip" onClick={() => document.getElementById("main")?.focus()}>
        Skip to the page
      </button>
      <header class="top">
        <a class="brand" href="#/">
          Holdfast
        </a>
        <nav aria-label="Pages">
          {PAGES.map(([page, name]) => (
            <a key={page} href={`#/${page}`} aria-current={page === here ? "page" : undefined}>
              {name}
            </a>
          ))}
        </nav>
      </header>
      <main id="main" tabIndex={-1}>
        {signedIn === null ? (
          <Loading what="the session" />
        ) : signedIn ? (
          <Page parts={parts} />
        ) : (
          <SignIn then={() => setSignedIn(true)} />
        )}
      </main>
    </>
  );
}

render(<App />, document.getElementById("app")!);
