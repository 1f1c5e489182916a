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

// Deadlines of a client. Each is longer than the deadline of the daemon for the same request, so
// that the error of the daemon arrives first.
const (
	requestTimeout = 10 * time.Second
	unmountTimeout = serverUmountTimeout + 10*time.Second
	mountTimeout   = MaxMountTimeout + 10*time.Second
)

// maxReplyBytes bounds the reply that a client reads.
const maxReplyBytes = 16 << 20

// A Client is a client of the control API. Its methods may be called concurrently. They return
// errors of type *Error, with the text of the daemon if the daemon replied.
type Client struct {
	socket string
	http   http.Client
}

// NewClient returns a client of the daemon at the unix socket with the given path.
func NewClient(socket string) *Client {
	return newClient(socket, func(net.Conn) {})
}

// newClient returns a client that calls connected with each connection.
func newClient(socket string, connected func(net.Conn)) *Client {
	c := &Client{socket: socket}
	c.http.Transport = &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			conn, err := d.DialContext(ctx, "unix", socket)
			if err == nil {
				connected(conn)
			}
			return conn, err
		},
	}
	return c
}

// Mount requests a mount and waits for it.
func (c *Client) Mount(ctx context.Context, r MountRequest) (info MountInfo, err error) {
	err = c.do(ctx, mountTimeout, http.MethodPost, pathMount, r, &info)
	return info, err
}

// Umount unmounts a mount.
func (c *Client) Umount(ctx context.Context, r UmountRequest) error {
	return c.do(ctx, unmountTimeout, http.MethodPost, pathUmount, r, nil)
}

// List returns all mounts.
func (c *Client) List(ctx context.Context) (l []MountInfo, err error) {
	err = c.do(ctx, requestTimeout, http.MethodGet, pathMounts, nil, &l)
	return l, err
}

// Status returns the status of the mount at dir, or of all mounts if dir is empty.
func (c *Client) Status(ctx context.Context, dir string) (l []MountStatus, err error) {
	err = c.do(ctx, requestTimeout, http.MethodGet, pathOf(pathStatus, dir), nil, &l)
	return l, err
}

// Stats returns the counters of the mount at dir, or of all mounts if dir is empty.
func (c *Client) Stats(ctx context.Context, dir string) (l []MountStats, err error) {
	err = c.do(ctx, requestTimeout, http.MethodGet, pathOf(pathStats, dir), nil, &l)
	return l, err
}

// Slow returns the slowest calls of the mount at dir, or of all mounts if dir is empty.
func (c *Client) Slow(ctx context.Context, dir string) (l []SlowCalls, err error) {
	err = c.do(ctx, requestTimeout, http.MethodGet, pathOf(pathSlow, dir), nil, &l)
	return l, err
}

// pathOf returns the path of a request about the mount at dir, or about all mounts if dir is empty.
func pathOf(path, dir string) string {
	if dir == "" {
		return path
	}
	return path + "?dir=" + url.QueryEscape(dir)
}

// Version returns the version of the daemon.
func (c *Client) Version(ctx context.Context) (v VersionInfo, err error) {
	err = c.do(ctx, requestTimeout, http.MethodGet, pathVersion, nil, &v)
	return v, err
}

// PID returns the process ID of the daemon, or 0 if its process is not visible, because it is in
// another PID namespace.
func (c *Client) PID(ctx context.Context) (pid int, err error) {
	_, err = newClient(c.socket, func(conn net.Conn) {
		if p, err := peerOf(conn); err == nil {
			pid = max(p.pid, 0)
		}
	}).Version(ctx)
	return pid, err
}

// do sends the request in and decodes the reply into out. Either may be nil.
func (c *Client) do(ctx context.Context, timeout time.Duration, method, path string, in, out any) error {
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return Errorf(CodeInternal, "control API: encode request: %w", err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(limited, method, "http://nfsrdmad"+path, body)
	if err != nil {
		return Errorf(CodeInternal, "control API: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.noReply(ctx, path, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return c.replyError(resp)
	}
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxReplyBytes)).Decode(out); err != nil {
		return Errorf(CodeSystem, "daemon at %s: decode reply: %w; "+
			"use a client and a daemon of one version", c.socket, err)
	}
	return nil
}

// withoutDaemon has what a user can do without a daemon, by the path of the request.
var withoutDaemon = map[string]string{
	pathMount:  ", or mount with --foreground",
	pathUmount: ", or use umount(8) if a killed daemon left the mount",
}

// replyError returns the error that the daemon replied.
func (c *Client) replyError(resp *http.Response) error {
	var e errorReply
	if json.NewDecoder(io.LimitReader(resp.Body, maxReplyBytes)).Decode(&e) != nil || e.Error == "" {
		return Errorf(CodeSystem, "daemon at %s: unexpected reply %q; check that nfsrdmad serves this socket", c.socket,
			resp.Status)
	}
	return &Error{Code: e.Code, Text: e.Error}
}

// Trace writes the trace events of a mount to w, one per line, as they happen. It returns nil after
// the last requested event, when the mount ends, and when ctx ends.
func (c *Client) Trace(ctx context.Context, r TraceRequest, w io.Writer) error {
	limited, cancel := context.WithCancel(ctx)
	defer cancel()
	req, err := http.NewRequestWithContext(limited, http.MethodGet, "http://nfsrdmad"+pathTrace+"?"+r.query(), nil)
	if err != nil {
		return Errorf(CodeInternal, "control API: %w", err)
	}
	timer := time.AfterFunc(requestTimeout, cancel)
	resp, err := c.http.Do(req)
	switch {
	case ctx.Err() != nil:
		if err == nil {
			resp.Body.Close()
		}
		return nil
	case !timer.Stop():
		if err == nil {
			resp.Body.Close()
		}
		return c.noReply(ctx, pathTrace, context.DeadlineExceeded)
	case err != nil:
		return c.noReply(ctx, pathTrace, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return c.replyError(resp)
	}
	out := &traceOutput{w: w}
	switch _, err := io.Copy(out, resp.Body); {
	case err == nil, ctx.Err() != nil:
		return nil
	case out.err != nil:
		return Errorf(CodeSystem, "trace %s: write events: %w", r.Dir, out.err)
	}
	return Errorf(CodeSystem, "trace %s: the daemon at %s ended; see its log", r.Dir, c.socket)
}

// A traceOutput keeps the error of the last Write, to tell an error of the output from an error of
// the connection.
type traceOutput struct {
	w   io.Writer
	err error
}

func (o *traceOutput) Write(b []byte) (int, error) {
	n, err := o.w.Write(b)
	o.err = err
	return n, err
}

// isAbsent reports whether err means that no daemon listens on the socket.
func isAbsent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}

// noReply returns the error of a request without a reply.
func (c *Client) noReply(ctx context.Context, path string, err error) error {
	var request *url.Error
	if errors.As(err, &request) { // the text of a url.Error is about HTTP
		err = request.Err
	}
	failed := func(code Code, text string) error { return &Error{Code: code, Text: text, Err: err} }
	at := "daemon at " + c.socket + ": "
	switch {
	case c.socket == "":
		return failed(CodeUsage, "control socket \"\": empty path; name the socket with --control-socket")
	case errors.Is(ctx.Err(), context.Canceled):
		return failed(CodeCanceled, at+"interrupted")
	case path == pathStop && isAbsent(err):
		return failed(CodeSystem, at+"not running")
	case isAbsent(err):
		return failed(CodeSystem, at+"not running; start it with \"systemctl start nfsrdmad\" or \"nfsrdmad daemon\""+
			withoutDaemon[path])
	case errors.Is(err, fs.ErrPermission):
		return failed(CodePermission, at+"permission denied; run as root, or as a member of its control_group")
	case errors.Is(err, context.DeadlineExceeded):
		return failed(CodeSystem, at+"no reply before the timeout; see its log")
	}
	return failed(CodeSystem, at+OneLine(err.Error()))
}
