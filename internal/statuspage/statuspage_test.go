package statuspage

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

// source returns one mount that a process uses.
type source struct{ err error }

func (s source) Status(context.Context, string) ([]control.MountStatus, error) {
	return []control.MountStatus{{MountInfo: control.MountInfo{Dir: "/mnt", Spec: "host:/export"},
		Calls: []control.PendingCall{{XID: "1a", Procedure: "READ", WaitsFor: "reply", CallOwner: owner}}}}, s.err
}

var owner = control.CallOwner{Owner: control.OwnerProcess, PID: 4711, UID: 4712, Command: "secret-command"}

func (s source) Slow(context.Context, string) ([]control.SlowCalls, error) {
	slow := []control.SlowCall{{Name: "WRITE", Total: 4714, CallOwner: owner}}
	return []control.SlowCalls{{Dir: "/mnt", Requests: slow, Calls: slices.Clone(slow)}}, nil
}

func (s source) Stats(context.Context, string) ([]control.MountStats, error) {
	return []control.MountStats{{Dir: "/mnt", Numbers: control.Numbers{Metrics: stats.Values{"read_bytes_total": 4713}},
		Processes: []control.Usage{{PID: 4711, Command: "secret-command"}}, Users: []control.Usage{{UID: 4712}}}}, nil
}

func get(t *testing.T, s Source, method, path string) *http.Response {
	t.Helper()
	mux := http.NewServeMux()
	Register(mux, s)
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest(method, "http://127.0.0.1:9620"+path, nil))
	return w.Result()
}

func body(t *testing.T, r *http.Response) string {
	t.Helper()
	var b strings.Builder
	if err := r.Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestPageNamesNoUsers checks the data of the page, which all users of the host can read.
func TestPageNamesNoUsers(t *testing.T) {
	text := body(t, get(t, source{}, "GET", "/status.json"))
	for _, hidden := range []string{"secret-command", "4711", "4712"} {
		if strings.Contains(text, hidden) {
			t.Errorf("got %s, want no %q in it", text, hidden)
		}
	}
	var p Page
	err := json.NewDecoder(get(t, source{}, "GET", "/status.json").Body).Decode(&p)
	if err != nil || len(p.Mounts) != 1 || p.Mounts[0].Status.Spec != "host:/export" ||
		p.Mounts[0].Stats.Metrics.Count("read_bytes_total") != 4713 || len(p.Mounts[0].Slow.Calls) != 1 ||
		p.Mounts[0].Slow.Calls[0].Total != 4714 || len(p.Mounts[0].Status.Calls) != 1 ||
		p.Mounts[0].Status.Calls[0].Procedure != "READ" {
		t.Errorf("got %+v, %v, want the mount with its call and its counters", p, err)
	}
}

// TestPageLoadsNothingElse checks the files of the page, their types, and the headers that keep a
// browser from loading and running anything else.
func TestPageLoadsNothingElse(t *testing.T) {
	for path, kind := range map[string]string{"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css",
		"/status.json": "application/json"} {
		r := get(t, source{}, "GET", path)
		if r.StatusCode != http.StatusOK || !strings.HasPrefix(r.Header.Get("Content-Type"), kind) {
			t.Errorf("%s: got %s, %s, want 200 and %s", path, r.Status, r.Header.Get("Content-Type"), kind)
		}
		policy := r.Header.Get("Content-Security-Policy")
		if !strings.HasPrefix(policy, "default-src 'none';") || strings.Contains(policy, "unsafe") ||
			r.Header.Get("X-Content-Type-Options") != "nosniff" || r.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: got headers %v, want a strict policy", path, r.Header)
		}
		text := body(t, r)
		text = strings.ReplaceAll(text, "http://www.w3.org/2000/svg", "") // a name, not a URL to load
		if kind != "application/json" && strings.Contains(text, "://") {
			t.Errorf("%s: got a URL of another host", path)
		}
	}
	for _, bad := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("} {
		if script, err := files.ReadFile("page.js"); err != nil || strings.Contains(string(script), bad) {
			t.Errorf("page.js: got %s, %v, want only text nodes", bad, err)
		}
	}
}

// TestPageIsReadOnly checks that no request can change anything.
func TestPageIsReadOnly(t *testing.T) {
	for _, method := range []string{"POST", "PUT", "DELETE", "PATCH"} {
		for _, path := range []string{"/", "/status.json", "/page.js"} {
			if r := get(t, source{}, method, path); r.StatusCode != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: got %s, want 405", method, path, r.Status)
			}
		}
	}
	if r := get(t, source{}, "GET", "/page.html/../statuspage.go"); r.StatusCode == http.StatusOK {
		t.Errorf("other file: got %s, want an error", r.Status)
	}
	r := get(t, source{errors.New("no status")}, "GET", "/status.json")
	if r.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("without status: got %s, want 503", r.Status)
	}
}

// detached returns a mount that umount --lazy has detached, and a new one at the same directory.
type detached struct{}

var since = [...]time.Time{time.Unix(100, 1), time.Unix(100, 2)}

func (detached) Status(context.Context, string) (l []control.MountStatus, _ error) {
	for _, at := range since {
		l = append(l, control.MountStatus{MountInfo: control.MountInfo{Dir: "/mnt", Since: at}})
	}
	return l, nil
}

func (detached) Stats(context.Context, string) (l []control.MountStats, _ error) {
	for i, at := range since {
		l = append(l, control.MountStats{Dir: "/mnt", Since: at, Uptime: float64(i)})
	}
	return l, nil
}

func (detached) Slow(context.Context, string) (l []control.SlowCalls, _ error) {
	for i, at := range since {
		l = append(l, control.SlowCalls{Dir: "/mnt", Since: at, Calls: make([]control.SlowCall, i)})
	}
	return l, nil
}

func TestPageTellsMountsOfOneDirectoryApart(t *testing.T) {
	var p Page
	err := json.NewDecoder(get(t, detached{}, "GET", "/status.json").Body).Decode(&p)
	if err != nil || len(p.Mounts) != len(since) {
		t.Fatalf("got %+v, %v, want %d mounts", p, err, len(since))
	}
	for i, m := range p.Mounts {
		if !m.Status.Since.Equal(since[i]) || m.Stats.Uptime != float64(i) || len(m.Slow.Calls) != i {
			t.Errorf("mount %d: got %+v, want its own counters and calls", i, m)
		}
	}
}
