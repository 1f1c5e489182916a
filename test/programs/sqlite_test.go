package programs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const (
	sqliteWriters      = 2 // on each of two mounts
	sqliteTransactions = 500
	sqliteKills        = 12
	// sqliteBusy is how long SQLite waits for a lock. It polls, so a writer may wait long while
	// others get the lock.
	sqliteBusy = 10 * time.Minute
)

// sqlitePragmas select the rollback journal, which needs only fcntl(2) locks. A write-ahead log
// needs memory that all clients share.
var sqlitePragmas = fmt.Sprintf(".bail on\n.timeout %d\nPRAGMA journal_mode=DELETE;\n", sqliteBusy.Milliseconds())

// TestSQLite writes a database by processes on two mounts of two clients. Some processes are killed
// in a transaction, and other processes roll it back. The database must be correct and have each
// transaction that was confirmed.
func TestSQLite(t *testing.T) {
	kit.NeedsPrograms(t, "sqlite3")
	t.Run("embedded", func(t *testing.T) { testSQLite(t, startEmbedded(t)) })
	// The lock service of NFS-Ganesha needs a host with a port mapper.
	t.Run("ganesha", func(t *testing.T) { testSQLite(t, startGanesha(t, ganesha.OwnHost())) })
}

func testSQLite(t *testing.T, s *server) {
	mounts := []string{s.mount(t), s.mount(t)}
	file := func(mount int) string { return filepath.Join(mounts[mount%2], "db") }
	sqlite(t, file(0), "CREATE TABLE rows (id INTEGER PRIMARY KEY, writer INT, n INT, text TEXT);"+
		"CREATE INDEX by_text ON rows (text, writer); CREATE TABLE counts (writer INTEGER PRIMARY KEY, n INT);")

	var wg sync.WaitGroup
	for w := range 2 * sqliteWriters {
		wg.Go(func() {
			out, err := sqliteCommand(t, file(w), sqliteScript(w, sqliteTransactions)).CombinedOutput()
			if n := strings.Count(string(out), confirmed); err != nil || n != sqliteTransactions {
				t.Errorf("writer %d: %d of %d transactions, %v\n%s", w, n, sqliteTransactions, err,
					strings.ReplaceAll(string(out), confirmed, ""))
			}
		})
	}
	var killed [sqliteKills]int
	for k := range sqliteKills {
		killed[k] = killWriter(t, file(k), 2*sqliteWriters+k)
	}
	wg.Wait()

	for mount := range mounts {
		if got := sqlite(t, file(mount), "PRAGMA integrity_check;"); got != "ok" {
			t.Errorf("integrity_check on mount %d: got\n%s, want ok", mount, got)
		}
		for w := range 2*sqliteWriters + sqliteKills {
			rows := sqlite(t, file(mount),
				fmt.Sprintf("SELECT count(*), count(DISTINCT n) FROM rows WHERE writer = %d;", w))
			n := sqlite(t, file(mount), fmt.Sprintf("SELECT coalesce(max(n), 0) FROM counts WHERE writer = %d;", w))
			low, high := sqliteTransactions, sqliteTransactions
			if k := w - 2*sqliteWriters; k >= 0 {
				low, high = killed[k], killed[k]+1
			}
			if got, err := strconv.Atoi(n); err != nil || got < low || got > high || rows != n+"|"+n {
				t.Errorf("mount %d, writer %d: got count %s and rows %s, want %d to %d", mount, w, n, rows, low, high)
			}
		}
	}
	if _, err := os.Stat(file(0) + "-journal"); err == nil {
		t.Error("a journal exists at the end, want none")
	}
}

// confirmed is what a transaction prints after its COMMIT.
const confirmed = "confirmed\n"

// sqliteScript has n transactions of a writer.
func sqliteScript(writer, n int) string {
	var s strings.Builder
	fmt.Fprintf(&s, "INSERT INTO counts VALUES (%d, 0);\n", writer)
	for i := range n {
		fmt.Fprintf(&s, "BEGIN IMMEDIATE; INSERT INTO rows (writer, n, text) VALUES (%d, %d, "+
			"hex(randomblob(%d))); UPDATE counts SET n = n + 1 WHERE writer = %d; COMMIT; SELECT 'confirmed';\n",
			writer, i, 10+i%3000, writer)
	}
	return s.String()
}

// sqliteCommand runs a script in a new process.
func sqliteCommand(t *testing.T, file, script string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), "sqlite3", file)
	cmd.Stdin = strings.NewReader(sqlitePragmas + script)
	cmd.WaitDelay = mounts.ProcessTimeout
	return cmd
}

// sqlite returns the last line of output of a script.
func sqlite(t *testing.T, file, script string) string {
	t.Helper()
	out, err := sqliteCommand(t, file, script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	lines := strings.SplitAfterN(strings.TrimSpace(string(out)), "\n", 2) // the first is the journal mode
	return strings.TrimSpace(lines[len(lines)-1])
}

// killWriter kills a writer after some transactions, and returns the number of those confirmed.
func killWriter(t *testing.T, file string, writer int) int {
	t.Helper()
	var out mounts.Output
	cmd := sqliteCommand(t, file, sqliteScript(writer, 100_000))
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	for deadline := time.Now().Add(sqliteBusy); strings.Count(out.String(), confirmed) < 10; {
		select {
		case <-ended:
			t.Fatalf("writer %d ended:\n%s", writer, out.String())
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Errorf("writer %d made no progress for %v", writer, sqliteBusy)
			break
		}
	}
	_ = cmd.Process.Kill()
	<-ended
	return strings.Count(out.String(), confirmed)
}
