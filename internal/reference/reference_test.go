package reference

import (
	"slices"
	"testing"
)

// source returns the parsed source of this module.
func source(t *testing.T) *Source {
	t.Helper()
	s, err := Parse("../..")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestWarningsAreExplained checks that each message of level warn or error has an explanation, and
// that each explanation belongs to a message.
func TestWarningsAreExplained(t *testing.T) {
	messages, err := source(t).Messages()
	if err != nil {
		t.Fatal(err)
	}
	used := make(map[string]bool)
	for _, m := range messages {
		used[m.Text] = true
		if (m.Level == "warn" || m.Level == "error") && Explanation(m.Text) == "" {
			t.Errorf("%s logs %q at level %s without an explanation; add what it means and what to do to explain.go",
				m.Package, m.Text, m.Level)
		}
	}
	for i, e := range explanations {
		if !used[e.message] {
			t.Errorf("explain.go explains %q, which is not a message of the log; remove it", e.message)
		}
		for _, other := range explanations[:i] {
			if other.message == e.message {
				t.Errorf("explain.go explains %q twice", e.message)
			}
		}
	}
}

// TestMessagesAreFound checks texts that the source hides: a sum, a constant of another package, a
// part that is computed, a parameter, and keys in a list.
func TestMessagesAreFound(t *testing.T) {
	messages, err := source(t).Messages()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ level, pkg, text, key string }{
		{"warn", "pkg/daemon", "an earlier daemon kept mounts; keep_mounts=false applies after all mounts are " +
			"unmounted and the daemon is restarted", ""},
		{"warn", "pkg/daemon", "FAULT INJECTION IS ON: this daemon breaks its connections on purpose", "plan"},
		{"error", "pkg/mount", "mount of an earlier daemon is left alone; …", "reason"},
		{"warn", "pkg/verbs/rdmacore", "RDMA device did not flush a queue pair in the error state; destroying it",
			"device"},
		{"warn", "pkg/csi", "call failed", "volume"},
		{"debug", "pkg/front", "READ of … bytes returned …", ""},
	} {
		found := false
		for _, m := range messages {
			if m.Level == tt.level && m.Package == tt.pkg && m.Text == tt.text {
				found = true
				if tt.key != "" && !slices.Contains(m.Keys, tt.key) {
					t.Errorf("%q: got keys %q, want also %s", tt.text, m.Keys, tt.key)
				}
			}
		}
		if !found {
			t.Errorf("the message %q of %s at level %s was not found", tt.text, tt.pkg, tt.level)
		}
	}
}

// TestErrorsAreFound checks the forms of errors with a class.
func TestErrorsAreFound(t *testing.T) {
	errs := source(t).Errors()
	for _, want := range []Error{
		{"usage", "pkg/daemon", "configuration …: … = …: …"},
		{"mount", "pkg/mount", "unmount …: in use; close its files (fuser -m lists the processes), or use --lazy or " +
			"--force"},
		{"permission", "pkg/control", "control: …: permission denied; the credentials of the client are unknown"},
	} {
		found := false
		for _, e := range errs {
			found = found || e == want
		}
		if !found {
			t.Errorf("the error %+v was not found", want)
		}
	}
}

func TestWithoutVerbs(t *testing.T) {
	for text, want := range map[string]string{
		"%s: %w": "…: …", "%-5.2f%%": "…%", "%": "%", "none": "none", "%[1]q": "…",
	} {
		if got := withoutVerbs(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}
