package vfs

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A killOp is an operation that must have its effect exactly once, without another result, however
// often its process is killed.
type killOp struct {
	name        string
	prepare, do func(r *killRun) error
	want        map[string]string // what the directory on the server has after the last close
	again       string            // event; after a kill at this event, another client makes the name f again
	// err is the result. A process that is killed before it records the result may return success,
	// because the repeated call cannot know whether the first one had the effect.
	err error
}

var long = strings.Repeat("0123456789abcdef", 3*killBufferSize/16+10)

// puts makes files on the server.
func puts(names ...string) func(*killRun) error {
	return func(r *killRun) error {
		for _, name := range names {
			r.put(name, name)
		}
		return nil
	}
}

// opened opens the last of some files.
func opened(flags uint32, names ...string) func(*killRun) error {
	return func(r *killRun) error {
		_ = puts(names...)(r)
		return r.open(names[len(names)-1], flags)
	}
}

// mkdir makes the directory d.
func mkdir(r *killRun) error {
	return do(r.keptMount, kernel.OpMkdir, r.dir, fuse.MkdirIn{Mode: 0o755}, "d\x00", none)
}

// wants returns nil if err is want.
func wants(want, err error) error {
	if !errors.Is(err, want) {
		return fmt.Errorf("got error %v, want %v", err, want)
	}
	return nil
}

// refuse returns a function that reports whether a call is of proc and has name, if not "", in its
// arguments.
func refuse(proc nfs3.Proc, name string) func(*sunrpc.Message) bool {
	return func(m *sunrpc.Message) bool {
		return nfs3.Proc(m.Proc) == proc && (name == "" || bytes.Contains(m.Args, sunrpc.AppendString(nil, name)))
	}
}

var killOps = []killOp{
	{name: "create exclusive", do: func(r *killRun) error {
		return r.create("f", unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, 0o644)
	}, want: map[string]string{"f": ""}},
	{name: "create without right to write", do: func(r *killRun) error {
		return errors.Join(r.create("f", unix.O_CREAT|unix.O_WRONLY, 0o444), r.write(0, "new"))
	}, want: map[string]string{"f": "new"}},
	{name: "mkdir", do: mkdir, want: map[string]string{"d": "d---------"}},
	{name: "mkdir of an existing name", prepare: puts("d"), do: func(r *killRun) error {
		return wants(unix.EEXIST, mkdir(r))
	}, want: map[string]string{"d": "d"}},
	{name: "mkdir of an existing directory", prepare: mkdir, do: mkdir, err: unix.EEXIST,
		want: map[string]string{"d": "d---------"}},
	{name: "mkfifo", do: func(r *killRun) error {
		return do(r.keptMount, kernel.OpMknod, r.dir, fuse.MknodIn{Mode: unix.S_IFIFO | 0o640}, "p\x00", none)
	}, want: map[string]string{"p": "p---------"}},
	{name: "symlink", do: func(r *killRun) error {
		return do(r.keptMount, kernel.OpSymlink, r.dir, fuse.InHeader{}, "l\x00target\x00", none)
	}, want: map[string]string{"l": "target"}},
	{name: "link", prepare: puts("f"), do: func(r *killRun) error {
		err := r.lookup("f")
		return errors.Join(err, do(r.keptMount, kernel.OpLink, r.dir, fuse.LinkIn{Oldnodeid: r.node}, "g\x00", none))
	}, want: map[string]string{"f": "f", "g": "f"}},
	{name: "unlink", prepare: puts("f"), do: func(r *killRun) error { return r.unlink("f") }, again: "after REMOVE"},
	{name: "unlink of a missing name", do: func(r *killRun) error { return r.unlink("f") }, err: unix.ENOENT},
	{name: "unlink and close", prepare: opened(unix.O_RDWR, "f"), do: func(r *killRun) error {
		return errors.Join(r.unlink("f"), r.write(0, "hidden"), r.close())
	}},
	{name: "rmdir", prepare: mkdir, do: func(r *killRun) error {
		return do(r.keptMount, kernel.OpRmdir, r.dir, fuse.InHeader{}, "d\x00", none)
	}},
	{name: "rename", prepare: puts("f"), do: func(r *killRun) error { return r.rename("f", "g") },
		want: map[string]string{"g": "f"}, again: "after RENAME"},
	{name: "rename that fails over an open file", prepare: opened(unix.O_RDWR, "f", "g"), do: func(r *killRun) error {
		r.refuse = refuse(nfs3.ProcRename, "f")
		return wants(unix.EACCES, r.rename("f", "g"))
	}, want: map[string]string{"f": "f", "g": "g"}},
	{name: "rename over an open file", prepare: opened(unix.O_RDWR, "f", "g"), do: func(r *killRun) error {
		return errors.Join(r.rename("f", "g"), r.write(0, "hidden"))
	}, want: map[string]string{"g": "f"}},
	{name: "chmod", prepare: puts("f"), do: func(r *killRun) error {
		in := fuse.SetAttrIn{}
		in.Valid, in.Mode = fuse.FATTR_MODE, 0o600
		return errors.Join(r.lookup("f"), r.setAttr(in))
	}, want: map[string]string{"f": "f"}},
	{name: "truncate", prepare: puts("file"), do: func(r *killRun) error {
		in := fuse.SetAttrIn{}
		in.Valid, in.Size = fuse.FATTR_SIZE, 3
		return errors.Join(r.lookup("file"), r.setAttr(in))
	}, want: map[string]string{"file": "fil"}},
	{name: "append", prepare: opened(unix.O_WRONLY|unix.O_APPEND, "f"), do: func(r *killRun) error {
		return errors.Join(r.write(0, ",one"), r.fsync(), r.write(0, ",two"), r.write(0, ",three"))
	}, want: map[string]string{"f": "f,one,two,three"}},
	{name: "write and fsync", prepare: opened(unix.O_RDWR, "f"), do: func(r *killRun) error {
		return errors.Join(r.write(0, long[:killBufferSize]), r.write(killBufferSize, long[killBufferSize:]), r.fsync())
	}, want: map[string]string{"f": long}},
	{name: "write error", prepare: opened(unix.O_WRONLY, "f"), do: func(r *killRun) error {
		r.refuse = refuse(nfs3.ProcWrite, "")
		defer func() { r.refuse = nil }()
		err := r.write(0, "refused")
		if err == nil { // else the next process wrote the data before it got the request again
			err = r.fsync()
		}
		return errors.Join(wants(unix.EACCES, err), r.fsync()) // reported once
	}, want: map[string]string{"f": "f"}},
	{name: "write and close", prepare: opened(unix.O_WRONLY, "f"), do: func(r *killRun) error {
		return errors.Join(r.write(1, "written"), r.close())
	}, want: map[string]string{"f": "fwritten"}},
}

// TestKillAtEachEvent kills the process at each event of each operation: before and after each call,
// each reply to the kernel, and each change of a record.
func TestKillAtEachEvent(t *testing.T) {
	e := startOwnExport(t)
	conn, err := e.dial(t.Context())
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	t.Cleanup(func() { recordChanged = nil })
	for _, mode := range []killMode{
		{name: "one kill", kills: 1, cache: true},
		{name: "server without cache", kills: 1},
		{name: "two kills", kills: 2, cache: true},
	} {
		t.Run(mode.name, func(t *testing.T) {
			for i := range killOps {
				t.Run(killOps[i].name, func(t *testing.T) { killOps[i].killAtEachEvent(t, e, conn, mode) })
			}
		})
	}
}

func (op *killOp) killAtEachEvent(t *testing.T, e *export, conn transport, mode killMode) {
	for event := 1; !t.Failed(); event++ {
		r := &killRun{keptMount: newKeptMount(t, e, conn, mode, event)}
		r.local = filepath.Join(e.dir, fmt.Sprintf("%s, %s, event %d", mode.name, op.name, event))
		op.run(r)
		if r.kills == 0 {
			t.Logf("%d events", event-1)
			return
		}
	}
}

// run runs the operation in a new directory.
func (op *killOp) run(r *killRun) {
	r.t.Helper()
	must(r.t, unix.Mkdir(r.local, 0o755))
	var out fuse.EntryOut
	must(r.t, do(r.keptMount, kernel.OpLookup, fuse.FUSE_ROOT_ID, fuse.InHeader{}, filepath.Base(r.local)+"\x00", &out))
	r.dir = out.NodeId
	if op.prepare != nil {
		must(r.t, op.prepare(r))
	}
	want := make(map[string]string)
	maps.Copy(want, op.want)
	r.onKill = func() {
		if r.last == op.again && r.mode.cache {
			r.put("f", "another file")
			want["f"] = "another file"
		}
	}
	r.arm(true)
	err := op.do(r)
	r.restart() // a background call may have been the event
	r.arm(false)
	r.restart()
	unclear := err == nil && r.kills > 0 && !strings.HasSuffix(r.last, " the reply")
	if !unclear && !errors.Is(err, op.err) {
		r.t.Errorf("killed at event %d (%s): got error %v, want %v", r.event, r.last, err, op.err)
	}
	if err := r.close(); err != nil {
		r.t.Errorf("close after a kill at event %d (%s): %v", r.event, r.last, err)
	}
	r.check(want)
	r.end()
}

func (x *keptMount) arm(armed bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.armed = armed
}

// check checks the effect of the operation, and that nothing is left when the kernel forgets all
// nodes.
func (r *killRun) check(want map[string]string) {
	r.t.Helper()
	r.fs.inodes.mu.Lock()
	var nodes []uint64
	for id := range r.fs.inodes.byID {
		if id != fuse.FUSE_ROOT_ID {
			nodes = append(nodes, id)
		}
	}
	r.fs.inodes.mu.Unlock()
	for _, id := range nodes {
		r.fs.Forget(id, 1<<20)
	}
	kit.Eventually(r.t, fmt.Sprintf("end of all records after a kill at event %d (%s)", r.event, r.last), func() bool {
		s := r.state
		return s.nodes.Len()+s.files.Len()+s.hidden.Len()+s.extents.Len()+s.requests.Len() == 0
	})
	if got := r.content(); !maps.Equal(got, want) {
		r.t.Errorf("killed at event %d (%s): got %.100q on the server, want %.100q", r.event, r.last, got, want)
	}
	if n := r.pool.Out(); n != 0 {
		r.t.Errorf("killed at event %d (%s): got %d buffers in use, want 0", r.event, r.last, n)
	}
}
