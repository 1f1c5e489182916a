package monitoring

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var screenshot = flag.String("screenshot", "", "write a picture of the status page to this PNG `file`")

// pageLimit bounds each wait for the browser, which is slow to start on a busy machine.
const pageLimit = 2 * time.Minute

// TestStatusPage opens the status page in Chromium under load. The page must follow
// mounts, rates, and the end of the daemon, and must show names as text.
func TestStatusPage(t *testing.T) {
	t.Parallel()
	kit.NeedsPrograms(t, "chromium")
	kit.NeedsFUSE(t)
	r := startRig(t, "")
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.WindowSize(1100, 1250), chromedp.UserDataDir(t.TempDir()))
	allocator, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	defer cancel()
	browser, cancel := chromedp.NewContext(allocator)
	defer cancel()
	wait := func(script string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(browser, pageLimit)
		defer cancel()
		for {
			done, err := chromedp.Run(ctx, chromedp.Evaluate[bool](script))
			if err == nil && done {
				return
			}
			if ctx.Err() != nil {
				text, _ := chromedp.Run(browser, chromedp.Evaluate[string]("document.body.innerText"))
				t.Fatalf("wait for %s: %v; page: %s", script, err, text)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	waitText := func(want string) {
		t.Helper()
		wait(fmt.Sprintf("document.body.innerText.includes(%q)", want))
	}
	if _, err := chromedp.Run(browser, chromedp.Navigate("http://"+r.metrics+"/")); err != nil {
		t.Fatalf("start Chromium: %v", err)
	}
	waitText("1 mount")
	waitText(r.dir)
	waitText("mounted, connected")

	endLoad := startLoad(t, r.dir)
	wait(`[...document.querySelectorAll("tbody td:first-child")].some(
		(c) => c.innerText === "READ" && Number(c.nextSibling.innerText) > 0)`)
	wait(`[...document.querySelectorAll("polyline.first")].some(
		(p) => new Set(p.getAttribute("points").split(" ").map((x) => x.split(",")[1])).size > 1)`)
	wait(`[...document.querySelectorAll("td.text")].some((c) => /server \d/.test(c.innerText))`) // slow calls
	if *screenshot != "" {
		time.Sleep(20 * time.Second) // for the plots
		png, err := chromedp.Run(browser, chromedp.FullScreenshot(100))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(*screenshot, png, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	endLoad()

	// The name would make an element if the page took it for HTML.
	strange := filepath.Join(t.TempDir(), `<img src=x onerror=document.title="bad">`)
	kit.Must(t, os.Mkdir(strange, 0o755))
	r.mount(t, strange)
	waitText("2 mounts")
	waitText(strange)
	title, err := chromedp.Run(browser, chromedp.Title())
	if err != nil {
		t.Fatal(err)
	}
	images, err := chromedp.Run(browser, chromedp.Evaluate[int](`document.querySelectorAll("img").length`))
	if err != nil {
		t.Fatal(err)
	}
	if title != "nfsrdmad" || images != 0 {
		t.Errorf("got title %q and %d images, want names only as text", title, images)
	}
	kit.Must(t, unix.Unmount(strange, 0))
	waitText("1 mount,")

	kit.Must(t, unix.Unmount(r.dir, 0))
	r.daemon.End(t, syscall.SIGTERM)
	waitText("The daemon does not answer")
	r.startDaemon(t)
	waitText("0 mounts")
}
