// The REST API: typed requests, and a hook that asks again when the event stream says that something has changed.
import { useEffect, useState } from "preact/hooks";
import type { components } from "./schema";

export type Schemas = components["schemas"];
export type Fleet = Schemas["Fleet"];
export type FleetJob = Schemas["FleetJob"];
export type FleetCheckpoints = Schemas["FleetCheckpoints"];
export type FleetNodes = Schemas["FleetNodes"];
export type Job = Schemas["Job"];
export type Incident = Schemas["Incident"];
export type NodeDetail = Schemas["NodeDetail"];
export type NodeGpus = Schemas["NodeGpus"];
export type FleetReport = Schemas["FleetReport"];
export type JobReport = Schemas["JobReport"];
export type RankColumns = Schemas["RankColumns"];
export type RankMeasurements = Schemas["RankMeasurements"];
export type Timeline = Schemas["Timeline"];

const EVENTS = ["JobAccepted", "JobChanged", "GenerationChanged", "IncidentChanged", "NodeChanged", "FindingJudged"];
const AFTER_EVENT_MS = 300; // events come in bursts
const REST = 10; // between two requests: as many times as long as the last one took

/** An answer that says what is wrong. `status` 0: there was no answer. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

let onSignedOut = () => {};

/** `then` is called when an answer says that the token or the session is missing. */
export function whenSignedOut(then: () => void) {
  onSignedOut = then;
}

export async function request<T>(method: string, path: string, body?: unknown): Promise<T> {
  const headers: Record<string, string> = body === undefined ? {} : { "Content-Type": "application/json" };
  let answer: Response;
  try {
    answer = await fetch(path, { method, headers, body: body === undefined ? null : JSON.stringify(body) });
  } catch {
    throw new Refused(0, "the supervisor does not answer");
  }
  const given = await answer.json().catch(() => ({ detail: answer.statusText }));
  if (answer.ok) return given as T;
  if (answer.status === 401 && path !== "v1/session") onSignedOut();
  throw new Refused(answer.status, String(given.detail ?? answer.statusText));
}

export const get = <T>(path: string) => request<T>("GET", path);

/** Path of the API with each part escaped: names may hold any character. */
export const path = (...parts: (string | number)[]) => `v1/${parts.map(encodeURIComponent).join("/")}`;

/** Send a command and wait until it was carried out. Returns what the supervisor says about it. */
export async function command(method: string, url: string, body?: unknown): Promise<string> {
  let operation = await request<Schemas["Operation"]>(method, url, body);
  for (let wait_ms = 100; operation.state === "pending" && wait_ms < 1_500; wait_ms *= 1.5) {
    await new Promise((done) => setTimeout(done, wait_ms));
    operation = await get<Schemas["Operation"]>(path("operations", operation.id));
  }
  if (operation.state === "failed") throw new Refused(409, operation.reason);
  return operation.state === "pending" ? "accepted; it is being carried out" : operation.reason || "done";
}

// ---------------------------------------------------------------- the event stream, one for the page

type Listener = () => void;
const listeners = new Set<Listener>();
let source: EventSource | null = null;

/** Open the stream again: after a sign-in, and when the browser has given up. */
export function listen() {
  source?.close();
  source = new EventSource("v1/events");
  for (const kind of EVENTS) source.addEventListener(kind, () => listeners.forEach((each) => void each()));
}

export interface Look<T> {
  value: T | null;
  problem: string | null;
  missing: boolean; // the API says that there is no such thing
}

/** What the API answers at `url`, now and again: after events, and every `every_ms` at the latest. */
export function useLook<T>(url: string | null, every_ms: number, after_events = true): Look<T> {
  const [state, setState] = useState<{ url: string | null; value: T | null; error: Refused | null }>({
    url,
    value: null,
    error: null,
  });
  useEffect(() => {
    if (url === null) return;
    let over = false;
    let busy = false;
    let due_ms = 0;
    let not_before_ms = 0;
    let timer = 0;
    const plan = (in_ms: number) => {
      const at_ms = Math.max(performance.now() + in_ms, not_before_ms);
      if (due_ms && due_ms <= at_ms) return;
      due_ms = at_ms;
      clearTimeout(timer);
      timer = window.setTimeout(ask, at_ms - performance.now());
    };
    const ask = async () => {
      if (busy || over) return;
      busy = true;
      due_ms = 0;
      const began_ms = performance.now();
      try {
        const value = await get<T>(url);
        if (!over) setState({ url, value, error: null });
      } catch (error) {
        if (!over)
          setState((before) => ({ url, value: before.url === url ? before.value : null, error: error as Refused }));
      }
      busy = false;
      not_before_ms = performance.now() + Math.min(REST * (performance.now() - began_ms), every_ms);
      if (!over) plan(every_ms);
    };
    const heard = () => plan(AFTER_EVENT_MS);
    if (after_events) listeners.add(heard);
    ask();
    return () => {
      over = true;
      clearTimeout(timer);
      listeners.delete(heard);
    };
  }, [url, every_ms, after_events]);
  const mine = state.url === url;
  return {
    value: mine ? state.value : null,
    problem: mine && state.error ? state.error.message : null,
    missing: mine && state.error?.status === 404,
  };
}
