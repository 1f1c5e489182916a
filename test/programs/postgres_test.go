package programs

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const (
	// databaseTimeout bounds the start of the database, with recovery, and its stop.
	databaseTimeout = 10 * time.Minute
	databaseClients = 8
)

// A database is a PostgreSQL cluster on a mount, of the user postgres.
type database struct {
	bin, data string   // programs, and the data directory
	env       []string // of clients
	log       string   // file
	server    *exec.Cmd
	ended     chan struct{} // closed after the server has ended
}

// TestPostgreSQL runs transactions while the database is killed, and while the NFS server is
// killed. Each transaction that was confirmed must be in the database. Indexes, checksums and
// balances must be correct.
func TestPostgreSQL(t *testing.T) {
	kit.NeedsPrograms(t, "setpriv")
	onEachServer(t, func(t *testing.T, s *server) {
		mnt := s.mount(t)
		db := newDatabase(t, mnt)
		db.start(t)
		db.bench(t, "-i", "-s", "10", "-q")
		db.sql(t, "CREATE EXTENSION amcheck")
		confirmed := transactions(t, db.bench(t, "-T", "60"))
		db.check(t, confirmed, confirmed)

		load := db.startLoad(t)
		db.waitForTransactions(t, confirmed+500)
		db.kill(t)
		out, err := load.wait(t)
		if err == nil {
			t.Errorf("pgbench succeeded although the database was killed:\n%s", out)
		}
		confirmed += transactions(t, out)
		db.start(t)
		// Each client may have sent a COMMIT that was executed and not answered.
		confirmed = db.check(t, confirmed, confirmed+databaseClients)

		const perClient = 500
		load = db.startLoad(t, "-t", strconv.Itoa(perClient))
		db.waitForTransactions(t, confirmed+500)
		s.restart(t)
		if n := db.transactions(t); n >= confirmed+databaseClients*perClient {
			t.Errorf("all transactions ended before the NFS server was killed; raise their number above %d", perClient)
		}
		if out, err = load.wait(t); err != nil {
			t.Errorf("pgbench while the NFS server was killed: %v\n%s", err, out)
		}
		confirmed += transactions(t, out)
		db.check(t, confirmed, confirmed)
		db.stop(t)
		other := s.mount(t)
		run(t, "", filepath.Join(db.bin, "pg_checksums"), "--check", "-D", filepath.Join(other, "data"))
	})
}

// newDatabase makes a cluster on a mount and stops it when the test ends.
func newDatabase(t *testing.T, mnt string) *database {
	t.Helper()
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/pg_amcheck")
	if err != nil || len(found) == 0 {
		t.Fatalf("pg_amcheck not found (%v); run make test-programs to install postgresql and postgresql-contrib", err)
	}
	socket := mounts.OpenTempDir(t)
	db := &database{bin: filepath.Dir(found[len(found)-1]), data: makeDir(t, mnt, "data"),
		env: append(os.Environ(), "PGHOST="+socket, "PGUSER=postgres", "PGDATABASE=postgres"),
		log: filepath.Join(t.TempDir(), "log")}
	run(t, "", "chown", "postgres:", db.data)
	run(t, "", "chmod", "700", db.data)
	db.asPostgres(t, "initdb", "-D", db.data, "--no-locale", "--encoding", "UTF8", "--data-checksums")
	settings := fmt.Sprintf("listen_addresses = ''\nunix_socket_directories = '%s'\nshared_buffers = 32MB\n", socket)
	f, err := os.OpenFile(filepath.Join(db.data, "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(settings); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if db.server != nil {
			db.kill(t)
		}
		if log, err := os.ReadFile(db.log); t.Failed() && err == nil {
			t.Logf("end of the log of PostgreSQL:\n%s", log[max(0, len(log)-4000):])
		}
	})
	return db
}

// postgresUser are the arguments of setpriv that make a process run as postgres.
var postgresUser = []string{"--reuid=postgres", "--regid=postgres", "--init-groups"}

// asPostgres runs a program of PostgreSQL as its user.
func (db *database) asPostgres(t *testing.T, program string, args ...string) string {
	t.Helper()
	return run(t, "/", "setpriv", append(append(postgresUser[:3:3], filepath.Join(db.bin, program)), args...)...)
}

// start starts the database and waits until it accepts connections, so until recovery has ended.
func (db *database) start(t *testing.T) {
	t.Helper()
	log, err := os.OpenFile(db.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	args := append(postgresUser[:3:3], "--pdeathsig", "QUIT", filepath.Join(db.bin, "postgres"), "-D", db.data)
	db.server, db.ended = exec.Command("setpriv", args...), make(chan struct{})
	db.server.Dir, db.server.Stdout, db.server.Stderr = "/", log, log
	if err := db.server.Start(); err != nil {
		t.Fatal(err)
	}
	go func(cmd *exec.Cmd, ended chan struct{}) {
		defer close(ended)
		_ = cmd.Wait()
	}(db.server, db.ended)
	db.poll(t, "start", func() bool { return db.client(t, "psql", "-c", "SELECT 1").Run() == nil })
}

// poll waits until done returns true. It fails the test when the database ends.
func (db *database) poll(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(databaseTimeout); !done(); time.Sleep(100 * time.Millisecond) {
		select {
		case <-db.ended:
			t.Fatalf("%s: the database ended", what)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not done after %v", what, databaseTimeout)
		}
	}
}

// kill kills the first process of the database with SIGKILL, and waits until the others have ended.
// These end when they notice the death.
func (db *database) kill(t *testing.T) {
	t.Helper()
	if err := db.server.Process.Kill(); err != nil {
		t.Errorf("kill the database: %v", err)
	}
	<-db.ended
	db.server = nil
	deadline := time.Now().Add(databaseTimeout)
	for inUse(db.data) {
		if time.Now().After(deadline) {
			t.Fatalf("processes of the database still run %v after its death", databaseTimeout)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// inUse reports whether a process has dir as its working directory.
func inUse(dir string) bool {
	links, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		return false
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == dir {
			return true
		}
	}
	return false
}

// stop ends the database after a checkpoint.
func (db *database) stop(t *testing.T) {
	t.Helper()
	if err := db.server.Process.Signal(syscall.SIGINT); err != nil { // "fast shutdown"
		t.Fatal(err)
	}
	select {
	case <-db.ended:
	case <-time.After(databaseTimeout):
		t.Fatalf("the database still runs %v after SIGINT", databaseTimeout)
	}
	if db.server.ProcessState.ExitCode() != 0 {
		t.Errorf("the database ended with %v", db.server.ProcessState)
	}
	db.server = nil
}

func (db *database) client(t *testing.T, program string, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), mounts.RunTimeout)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, filepath.Join(db.bin, program), args...)
	cmd.Env = db.env
	return cmd
}

// sql returns the result of a query.
func (db *database) sql(t *testing.T, query string) string {
	t.Helper()
	out, err := db.client(t, "psql", "-X", "-A", "-t", "-c", query).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", query, err, out)
	}
	return strings.TrimSpace(string(out))
}

func (db *database) bench(t *testing.T, args ...string) string {
	t.Helper()
	out, err := db.startLoad(t, args...).wait(t)
	if err != nil {
		t.Fatalf("pgbench %v: %v\n%s", args, err, out)
	}
	return out
}

// A load is a running pgbench.
type load struct {
	cmd *exec.Cmd
	out bytes.Buffer
}

// startLoad starts pgbench. Without args it runs until the database ends.
func (db *database) startLoad(t *testing.T, args ...string) *load {
	t.Helper()
	if len(args) == 0 {
		args = []string{"-t", "1000000"}
	}
	if args[0] != "-i" {
		args = append(args, "-n", "-c", strconv.Itoa(databaseClients), "-j", "2")
	}
	l := &load{cmd: db.client(t, "pgbench", args...)}
	l.cmd.Stdout, l.cmd.Stderr = &l.out, &l.out
	if err := l.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *load) wait(t *testing.T) (string, error) {
	t.Helper()
	err := l.cmd.Wait()
	t.Logf("%v\n%s", l.cmd.Args[1:], l.out.String())
	return l.out.String(), err
}

var transactionsLine = regexp.MustCompile(`number of transactions actually processed: (\d+)`)

// transactions returns the number of transactions that were confirmed to pgbench.
func transactions(t *testing.T, out string) int {
	t.Helper()
	m := transactionsLine.FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("pgbench printed no number of transactions:\n%s", out)
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func (db *database) waitForTransactions(t *testing.T, n int) {
	t.Helper()
	db.poll(t, "transactions", func() bool { return db.transactions(t) >= n })
}

// transactions returns the number of transactions that the database has.
func (db *database) transactions(t *testing.T) int {
	t.Helper()
	n, err := strconv.Atoi(db.sql(t, "SELECT count(*) FROM pgbench_history"))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// check checks indexes, balances and the number of transactions, and returns this number.
func (db *database) check(t *testing.T, low, high int) int {
	t.Helper()
	if out, err := db.client(t, "pg_amcheck", "--heapallindexed", "--rootdescend").CombinedOutput(); err != nil {
		t.Errorf("pg_amcheck: %v\n%s", err, out)
	}
	sums := db.sql(t, "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM "+
		"pgbench_branches), (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT sum(delta) FROM pgbench_history)")
	for _, sum := range strings.Split(sums, "|") {
		if first, _, _ := strings.Cut(sums, "|"); sum != first {
			t.Errorf("sums of balances differ: %s", sums)
		}
	}
	n := db.transactions(t)
	if n < low || n > high {
		t.Errorf("the database has %d transactions, want %d to %d", n, low, high)
	}
	return n
}
