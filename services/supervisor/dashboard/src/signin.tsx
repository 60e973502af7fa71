// Sign-in by a token of the API. The browser keeps a cookie that scripts cannot read, and no script keeps the token.
import { useState } from "preact/hooks";
import { request } from "./api";
import { Problem } from "./parts";

export function SignIn({ then }: { then: () => void }) {
  const [problem, setProblem] = useState<string | null>(null);
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const token = new FormData(event.currentTarget as HTMLFormElement).get("token");
    try {
      await request("POST", "v1/session", { token });
      then();
    } catch (error) {
      setProblem((error as Error).message);
    }
  };
  return (
    <form class="panel signin" onSubmit={submit}>
      <h1>Sign in</h1>
      <label>
        API token
        <input name="token" type="password" required autocomplete="current-password" autofocus />
      </label>
      <p class="quiet">
        HOLDFAST_API_TOKEN of the supervisors, a token of <code>holdfast tokens create</code>, or one of the OpenID
        Connect issuer that the supervisors trust. For a stack that you have started on this machine,{" "}
        <code>holdfast dashboard</code> prints an address that signs you in. The session ends with the token, and after
        12 hours.
      </p>
      <Problem text={problem} />
      <button type="submit" class="primary">
        Sign in
      </button>
    </form>
  );
}
