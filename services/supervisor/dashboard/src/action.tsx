// Buttons that change something: each shows first what will happen, and the command that does the same.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { command } from "./api";

export interface Action {
  label: string; // of the button: one verb
  will: string; // what will happen, one or two sentences
  cli: string; // the `holdfast …` command that does the same
  method?: "POST" | "DELETE";
  url: string;
  body?: unknown;
  tone?: "danger";
}

export function ActionButton({
  action,
  children,
  disabled = "",
}: {
  action: () => Action;
  children: string;
  disabled?: string;
}) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" disabled={disabled !== ""} title={disabled} onClick={() => setOpen(true)}>
        {children}
      </button>
      {open && <Confirm action={action()} close={() => setOpen(false)} />}
    </>
  );
}

/** A dialog; `children` are fields that change the action. */
export function Confirm({
  action,
  close,
  children,
}: {
  action: Action;
  close: () => void;
  children?: ComponentChildren;
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [state, setState] = useState<{ busy: boolean; said: string; failed: boolean }>({
    busy: false,
    said: "",
    failed: false,
  });
  useEffect(() => dialog.current?.showModal(), []);
  const go = async () => {
    setState({ busy: true, said: "", failed: false });
    try {
      setState({ busy: false, said: await command(action.method ?? "POST", action.url, action.body), failed: false });
    } catch (error) {
      setState({ busy: false, said: (error as Error).message, failed: true });
    }
  };
  const over = state.said !== "" && !state.failed;
  return (
    <dialog ref={dialog} onClose={close} aria-labelledby="confirm-title">
      <h2 id="confirm-title">{action.label}</h2>
      <p>{action.will}</p>
      {!over && children}
      <p class="quiet">The same by command:</p>
      <pre class="command">{action.cli}</pre>
      <p role="status" class={state.failed ? "problem" : state.said ? "said" : ""}>
        {state.busy ? "Asking the supervisor …" : state.said}
      </p>
      <p class="buttons">
        <button type="button" onClick={() => dialog.current?.close()}>
          {over ? "Close" : "Cancel"}
        </button>
        {!over && (
          <button type="button" class={action.tone ?? "primary"} disabled={state.busy} onClick={go}>
            {action.label}
          </button>
        )}
      </p>
    </dialog>
  );
}
