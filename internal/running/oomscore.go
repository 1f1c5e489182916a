package running

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

const (
	scoreFile = "/proc/self/oom_score_adj"
	// lowestScore and highestScore are OOM_SCORE_ADJ_MIN and OOM_SCORE_ADJ_MAX of linux/oom.h. The
	// kernel never kills a process with the lowest score.
	lowestScore, highestScore = -1000, 1000
)

// AdjustOOMScore changes the order in which the kernel kills processes when memory is short. It
// adds thousandths of the memory of the host to the score of this process, which inherited the
// score from the process that started it. A process with a higher score is killed first. A lower
// score than an ancestor with CAP_SYS_RESOURCE has set needs this capability.
func AdjustOOMScore(thousandths int) error {
	b, err := os.ReadFile(scoreFile)
	if err != nil {
		return fmt.Errorf("OOM score: %w", err)
	}
	inherited, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return fmt.Errorf("OOM score: %s: %w", scoreFile, err)
	}
	score := min(max(inherited+thousandths, lowestScore), highestScore)
	if err := os.WriteFile(scoreFile, []byte(strconv.Itoa(score)), 0); err != nil {
		return fmt.Errorf("OOM score: %w", err)
	}
	return nil
}
