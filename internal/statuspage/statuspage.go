// Package statuspage serves a read-only page about the mounts of a daemon: connections, calls in
// flight, memory regions, rates and latencies. The page updates itself every two seconds.
//
// Every user of the host can open the page, so the daemon serves it on loopback only, and it names
// no processes and no users, and no files below a mount point. The daemon refuses requests with the
// name of another host. The page is plain HTML with one script and one style sheet, embedded in the
// program. It loads nothing from elsewhere.
package statuspage

import (
	"context"
	"embed"
	"encoding/json"
	"net/http"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

//go:embed page.html page.js page.css
var files embed.FS

// A Source is where the page gets its data from. All methods may be called concurrently and must
// not wait for a server. The page changes what they return. See control.Mounts.
type Source interface {
	Status(ctx context.Context, dir string) ([]control.MountStatus, error)
	Stats(ctx context.Context, dir string) ([]control.MountStats, error)
	Slow(ctx context.Context, dir string) ([]control.SlowCalls, error)
}

// Page is the data of the page. It is the reply to GET /status.json.
type Page struct {
	Version string    `json:"version"`
	Time    time.Time `json:"time"`
	Mounts  []Mount   `json:"mounts"`
}

// A Mount describes one mount without the processes and users that use it.
type Mount struct {
	Status control.MountStatus `json:"status"`
	Stats  control.MountStats  `json:"stats"`
	Slow   control.SlowCalls   `json:"slow"`
}

// Register adds the page to mux: GET / and the files that the page loads.
func Register(mux *http.ServeMux, s Source) {
	for path, file := range map[string]string{"/{$}": "page.html", "/page.js": "page.js", "/page.css": "page.css"} {
		mux.Handle("GET "+path, protect(func(w http.ResponseWriter, r *http.Request) {
			http.ServeFileFS(w, r, files, file)
		}))
	}
	mux.Handle("GET /status.json", protect(func(w http.ResponseWriter, r *http.Request) {
		p, err := pageOf(r.Context(), s)
		if err != nil {
			http.Error(w, control.OneLine(err.Error()), http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(p) // the client may have left
	}))
}

// protect adds headers that keep a browser from running or loading anything else, from showing the
// page inside another one, and from using old data.
func protect(h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		head := w.Header()
		head.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; "+
			"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		head.Set("X-Content-Type-Options", "nosniff")
		head.Set("Referrer-Policy", "no-referrer")
		head.Set("Cache-Control", "no-store")
		h(w, r)
	})
}

// pageOf returns the data of the page.
func pageOf(ctx context.Context, s Source) (*Page, error) {
	ctx, cancel := context.WithTimeout(ctx, control.StatusTimeout)
	defer cancel()
	status, err := s.Status(ctx, "")
	if err != nil {
		return nil, err
	}
	stats, err := s.Stats(ctx, "")
	if err != nil {
		return nil, err
	}
	slow, err := s.Slow(ctx, "")
	if err != nil {
		return nil, err
	}
	p := &Page{Version: control.Version().Version, Time: time.Now(), Mounts: []Mount{}}
	for i := range status {
		m := Mount{Status: status[i]}
		for _, one := range stats {
			if one.Key() == m.Status.Key() {
				m.Stats = one
			}
		}
		for _, one := range slow {
			if one.Key() == m.Status.Key() {
				m.Slow = one
			}
		}
		m.hideUsers()
		p.Mounts = append(p.Mounts, m)
	}
	return p, nil
}

// hideUsers removes what names processes and users.
func (m *Mount) hideUsers() {
	m.Stats.Processes, m.Stats.Users = nil, nil
	for i := range m.Status.Calls {
		hide(&m.Status.Calls[i].CallOwner)
	}
	for _, l := range [][]control.SlowCall{m.Slow.Requests, m.Slow.Calls} {
		for i := range l {
			hide(&l[i].CallOwner)
		}
	}
}

func hide(o *control.CallOwner) { o.PID, o.UID, o.Command = 0, 0, "" }
