// The log of a rank, as its agent reads it: the end first, then what is added.
import { useEffect, useRef, useState } from "preact/hooks";
import { get, type Job, path, Refused, type Schemas } from "./api";
import { quoted } from "./format";
import { Problem } from "./parts";

type Part = Schemas["RankLog"];

const EVERY_MS = 2_000;
const SHOWN_MAX = 1_000_000; // characters; older ones are dropped
const KEPT_GENERATIONS = 5;

/** What a terminal would show of lines that were overwritten, such as progress bars. */
const overwritten = (text: string) => text.replace(/\r+\n/g, "\n").replace(/[^\n]*\r(?=[^\n])/g, "");
// biome-ignore lint/suspicious/noControlCharactersInRegex: colours of terminals are what is to be removed
const plain = (text: string) => overwritten(text.replace(/\u001b\[[0-9;?]*[A-Za-z]/g, ""));

interface Shown {
  part: Part | null;
  text: string;
  problem: string | null;
}

function useLog(job: string, rank: number, generation: number, follow: boolean): Shown {
  const about = `${job} ${rank} ${generation}`;
  const [shown, setShown] = useState<Shown & { about: string }>({ about, part: null, text: "", problem: null });
  const next = useRef({ about: "", offset: 0 });
  useEffect(() => {
    let over = false;
    let timer = 0;
    const ask = async () => {
      const more = next.current.about === about;
      const query = new URLSearchParams({
        generation: `${generation}`,
        ...(more && { offset: `${next.current.offset}` }),
      });
      let behind = false;
      try {
        const part = await get<Part>(`${path("jobs", job, "ranks", rank, "log")}?${query}`);
        if (over) return;
        next.current = { about, offset: part.next_offset };
        behind = part.next_offset < part.size && part.text !== "";
        setShown((before) => ({
          about,
          part,
          text: (before.about === about && more ? before.text + part.text : part.text).slice(-SHOWN_MAX),
          problem: null,
        }));
      } catch (error) {
        if (over) return;
        setShown((before) => ({
          ...(before.about === about ? before : { about, part: null, text: "" }),
          problem: error instanceof Refused ? error.message : String(error),
        }));
      }
      if (follow || behind) timer = window.setTimeout(ask, behind ? 0 : EVERY_MS);
    };
    ask();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [job, rank, generation, follow, about]);
  return shown.about === about ? shown : { part: null, text: "", problem: null };
}

/** Stays at the end while it grows, unless somebody has scrolled up. */
function Box({ label, text }: { label: string; text: string }) {
  const box = useRef<HTMLPreElement>(null);
  const atEnd = useRef(true);
  const top = useRef(0);
  useEffect(() => {
    if (box.current && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [text]);
  const scrolled = ({ currentTarget: each }: { currentTarget: HTMLElement }) => {
    const nearEnd = each.scrollHeight - each.scrollTop - each.clientHeight < 40;
    // The event comes later, when there may be more text below: only who moves up leaves the end.
    atEnd.current = nearEnd || (atEnd.current && each.scrollTop >= top.current);
    top.current = each.scrollTop;
  };
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: what scrolls must be reachable by keyboard
    <pre class="log" role="log" aria-live="off" aria-label={label} tabIndex={0} ref={box} onScroll={scrolled}>
      {text}
    </pre>
  );
}

/** Chooses the rank that was typed once Enter is pressed or the field is left: the log of each digit's rank is not asked for. */
function RankField({ value, choose }: { value: number; choose: (rank: number) => void }) {
  const [typed, setTyped] = useState(`${value}`); // kept here: the page is drawn again every time the log has grown
  return (
    <label>
      Rank{" "}
      <input
        type="number"
        min={0}
        value={typed}
        onInput={(event) => setTyped(event.currentTarget.value)}
        onChange={(event) => {
          const rank = Math.max(0, Math.floor(event.currentTarget.valueAsNumber || 0));
          setTyped(`${rank}`);
          choose(rank);
        }}
      />
    </label>
  );
}

export function LogsTab({ job }: { job: Job }) {
  const [rank, setRank] = useState(0);
  const [back, setBack] = useState(0);
  const [follow, setFollow] = useState(true);
  const [wanted, setWanted] = useState("");
  const generation = Math.max(1, job.generation - back);
  const { part, text, problem } = useLog(job.name, rank, generation, follow && !back);
  const lines = plain(text).split("\n");
  const shown = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted.toLowerCase())) : lines;
  const body = shown.join("\n");
  const nothing = wanted ? "No line has this text." : "The rank has printed nothing yet.";
  const name = quoted(job.name);
  return (
    <>
      <form class="filters" onSubmit={(event) => event.preventDefault()}>
        <RankField value={rank} choose={setRank} />
        <label>
          Generation{" "}
          <select value={back} onChange={(event) => setBack(Number(event.currentTarget.value))}>
            {Array.from({ length: Math.min(KEPT_GENERATIONS, Math.max(1, job.generation)) }, (_, index) => (
              <option key={index} value={index}>
                {job.generation - index}
                {index ? "" : " (newest)"}
              </option>
            ))}
          </select>
        </label>
        <label>
          Lines with <input type="search" value={wanted} onInput={(event) => setWanted(event.currentTarget.value)} />
        </label>
        <label>
          <input type="checkbox" checked={follow} onChange={(event) => setFollow(event.currentTarget.checked)} /> Follow
        </label>
      </form>
      <Problem text={problem} />
      {part && (
        <>
          <p class="quiet">
            Rank {part.rank} on {part.node}, generation {part.generation}, {part.size.toLocaleString("en")} bytes. The
            same in a terminal:{" "}
            <code>
              holdfast logs {name} --rank {rank} --generation {generation}
              {follow && !back ? " -f" : ""}
            </code>
          </p>
          <Box label={`Log of rank ${part.rank}`} text={body || nothing} />
        </>
      )}
    </>
  );
}
