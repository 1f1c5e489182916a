package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"syscall"
	"time"
)

// What a client waits for: longer than the daemon's own limits, so that its word comes first.
const (
	clientQuick    = 10 * time.Second
	clientUmount   = umountTimeout + 10*time.Second
	clientMount    = MaxMountTimeout + 10*time.Second
	maxAnswerBytes = 16 << 20
)

// A Client speaks the control API. Safe for concurrent use. Its errors are *Error, with the
// daemon's own text where it answered.
type Client struct {
	socket string
	http   http.Client
}

// NewClient makes a client of the daemon at the unix socket path.
func NewClient(socket string) *Client {
	c := &Client{socket: socket}
	c.http.Transport = &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
	}
	return c
}

// Mount asks for a mount and waits for it.
func (c *Client) Mount(ctx context.Context, r MountRequest) (info MountInfo, err error) {
	err = c.do(ctx, clientMount, http.MethodPost, pathMount, r, &info)
	return info, err
}

// Umount ends a mount.
func (c *Client) Umount(ctx context.Context, r UmountRequest) error {
	return c.do(ctx, clientUmount, http.MethodPost, pathUmount, r, nil)
}

// List returns all mounts.
func (c *Client) List(ctx context.Context) (l []MountInfo, err error) {
	err = c.do(ctx, clientQuick, http.MethodGet, pathMounts, nil, &l)
	return l, err
}

// Status returns the status of the mount at dir, or of all if dir is empty.
func (c *Client) Status(ctx context.Context, dir string) (l []MountStatus, err error) {
	path := pathStatus
	if dir != "" {
		path += "?dir=" + url.QueryEscape(dir)
	}
	err = c.do(ctx, clientQuick, http.MethodGet, path, nil, &l)
	return l, err
}

// Version returns the daemon's version.
func (c *Client) Version(ctx context.Context) (v VersionInfo, err error) {
	err = c.do(ctx, clientQuick, http.MethodGet, pathVersion, nil, &v)
	return v, err
}

func (c *Client) do(ctx context.Context, limit time.Duration, method, path string, in, out any) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return Errorf(CodeInternal, "control API: encoding the request: %w", err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(limited, method, "http://nfsrdmad"+path, body)
	if err != nil {
		return Errorf(CodeInternal, "control API: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.unreachable(ctx, err)
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(io.LimitReader(resp.Body, maxAnswerBytes))
	if resp.StatusCode != http.StatusOK {
		return c.refusal(resp)
	}
	if out == nil {
		return nil
	}
	if err := dec.Decode(out); err != nil {
		return Errorf(CodeSystem, "asking the daemon at %s: its answer is not understood (%w); is it of another version?", c.socket, err)
	}
	return nil
}

// refusal is the daemon's own error.
func (c *Client) refusal(resp *http.Response) error {
	var e errorReply
	if json.NewDecoder(io.LimitReader(resp.Body, maxAnswerBytes)).Decode(&e) != nil || e.Error == "" {
		return Errorf(CodeSystem, "asking the daemon at %s: it answered %s; is that an nfsrdmad?", c.socket,
			resp.Status)
	}
	return &Error{Code: e.Code, Text: e.Error}
}

// Trace writes the trace events of a mount to w, a line each, as they come. It returns nil when all
// that was asked for was written, when the mount has ended, and when ctx ends, which is how a trace
// that follows is stopped.
func (c *Client) Trace(ctx context.Context, r TraceRequest, w io.Writer) error {
	limited, cancel := context.WithCancel(ctx)
	defer cancel()
	req, err := http.NewRequestWithContext(limited, http.MethodGet, "http://nfsrdmad"+pathTrace+"?"+r.query(), nil)
	if err != nil {
		return Errorf(CodeInternal, "control API: %w", err)
	}
	late := time.AfterFunc(clientQuick, cancel)
	resp, err := c.http.Do(req)
	switch {
	case ctx.Err() != nil:
		if err == nil {
			resp.Body.Close()
		}
		return nil
	case !late.Stop():
		if err == nil {
			resp.Body.Close()
		}
		return c.unreachable(ctx, context.DeadlineExceeded)
	case err != nil:
		return c.unreachable(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return c.refusal(resp)
	}
	out := &traceOutput{w: w}
	switch _, err := io.Copy(out, resp.Body); {
	case err == nil, ctx.Err() != nil:
		return nil
	case out.err != nil:
		return Errorf(CodeSystem, "trace of %s: writing it: %w", r.Dir, out.err)
	}
	return Errorf(CodeSystem, "trace of %s: the daemon at %s ended; see its log", r.Dir, c.socket)
}

// A traceOutput remembers why it could not write.
type traceOutput struct {
	w   io.Writer
	err error
}

func (o *traceOutput) Write(b []byte) (int, error) {
	n, err := o.w.Write(b)
	o.err = err
	return n, err
}

// unreachable explains why the daemon was not asked, or did not answer.
func (c *Client) unreachable(ctx context.Context, err error) error {
	var request *url.Error
	if errors.As(err, &request) { // its own words are HTTP's
		err = request.Err
	}
	switch {
	case c.socket == "":
		return &Error{Code: CodeUsage, Err: err,
			Text: "asking the daemon: no control socket is named; give its path with --control-socket"}
	case errors.Is(ctx.Err(), context.Canceled):
		return Errorf(CodeCanceled, "asking the daemon at %s: interrupted", c.socket)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return &Error{Code: CodeSystem, Err: err, Text: "asking the daemon at " + c.socket +
			": no daemon runs there; start it with \"systemctl start nfsrdmad\" or \"nfsrdmad daemon\", or mount with --foreground"}
	case errors.Is(err, fs.ErrPermission):
		return &Error{Code: CodePermission, Err: err, Text: "asking the daemon at " + c.socket +
			": permission denied; run as root"}
	case errors.Is(err, context.DeadlineExceeded):
		return &Error{Code: CodeSystem, Err: err, Text: "asking the daemon at " + c.socket +
			": no answer in time; see its log"}
	}
	return &Error{Code: CodeSystem, Err: err, Text: "asking the daemon at " + c.socket + ": " + OneLine(err.Error())}
}
