package data

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit/memnfs"
)

// TestWritersContinueInTurn lets writers of several users and files wait for room, and makes room one
// buffer at a time. A step is "+" and a writer to start: a letter for the user, a digit for the file,
// and perhaps a letter to tell it from others; "-" and a file that gives one buffer back; "x" and a
// writer that is interrupted; "!" and a file with which the server becomes busy; or a writer that
// continues. "w" after such a writer means that it must write without keeping data.
func TestWritersContinueInTurn(t *testing.T) {
	for _, c := range []struct{ name, held, steps string }{
		{"no wait", "11", "+a1 a1 +b2 b2"},
		{"users take turns", "1111", "+a1 +a1 +a1 +b1 +b1 -1 a1 -1 b1 -1 a1 -1 b1 -1 a1"},
		{"a writer with room does not overtake", "1122", "+a1 +b2 +a2 -1 a1 -1 b2 -2 a2"},
		{"a file over its share stops no other", "1112", "+a1 +a1 +b2 -2 b2 -1 a1 -2 -1 a1"},
		{"nor one of the same user", "1112", "+a1 +a1 +a2 -2 a2 -1 a1"},
		{"writers of one user and file keep their order", "11111122",
			"+a1p +a1q +a1r +a1s +a1t +a1u +c2p +c2q +c2r -1 c2p -1 a1p -2 c2q -2 a1q -2 c2r -1 a1r"},
		{"useless waits behind others", "11112222", "+a1 +a2 +a3 +b1 !1 !2 a3w -2 a1"},
		{"an interrupted writer leaves", "1111", "+a1 +b1 xa1 -1 b1"},
		{"the only file has no share", "1111", "-1 +a1 a1"},
		{"the end of the other file", "1112", "+a1 -2 a1"},
		{"all files are busy", "1122", "+a1 +b3 !1 !2 b3w -1 a1"},
		{"a busy file with its share", "1111", "+a1 +b2 !1 b2w -1 +b2 b2 -1 a1"},
	} {
		synctest.Test(t, func(t *testing.T) {
			limit := max(4, int64(len(c.held))) // buffers, of which one of several files may hold 3/4
			m := newMount(t, &memnfs.Server{}, 32, Config{Limit: limit * unit})
			files := make(map[byte]*File)
			for i := range byte(4) {
				files['0'+i] = m.file(uint64(i))
			}
			for _, f := range []byte(c.held) {
				files[f].takeAlways()
				m.dirty.files[files[f]] = &dirtyFile{flushing: true} // a flush that does not end
			}
			var got []string
			cancels := make(map[string][]context.CancelFunc)
			give := func(f *File) {
				if f.held == 1 {
					m.dirty.Lock()
					delete(m.dirty.files, f)
					m.dirty.Unlock()
				}
				f.give()
			}
			for _, step := range strings.Fields(c.steps) {
				name := step[1:]
				switch step[0] {
				case '+':
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					cancels[name] = append(cancels[name], cancel)
					cred := sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{UID: uint32(name[0])})
					w, f := &Writer{Cred: cred}, files[name[1]]
					go func() {
						switch taken, through := f.getRoom(ctx, w); {
						case taken:
							got = append(got, name)
						case through:
							got = append(got, name+"w")
						}
					}()
				case '-':
					give(files[name[0]])
				case 'x':
					cancels[name][0]()
				case '!':
					m.dirty.Lock()
					files[name[0]].busy++
					m.serveWriters()
					m.dirty.Unlock()
				default:
					if len(got) == 0 || got[0] != step {
						t.Fatalf("%s: writers that continue: got %v, want %s", c.name, got, step)
					}
					got = got[1:]
					continue
				}
				synctest.Wait()
			}
			if len(got) > 0 {
				t.Errorf("%s: further writers that continue: %v, want none", c.name, got)
			}
		})
	}
}

// TestOneReclaimForAllWaits lets requests wait for buffers. However many wait, files are written
// back one at a time, and none after the last request.
func TestOneReclaimForAllWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		var r reclaimer
		reclaim := func() { n++ }
		pass := func(waiting, want int) {
			t.Helper()
			time.Sleep(5*bufferPollInterval + 1)
			synctest.Wait()
			if n != want {
				t.Errorf("files written back while %d requests wait: got %d, want %d", waiting, n, want)
			}
			n = 0
		}
		for _, requests := range []int{1, 1000} {
			for range requests {
				r.begin(reclaim)
			}
			pass(requests, 6) // one at once
			for range requests {
				r.end()
			}
			pass(0, 0)
		}
		for range 1000 { // short waits
			r.begin(reclaim)
			r.end()
		}
		pass(0, 1)
	})
}
